"""Where there are no direct calls: without torch's exchange API, or with a launcher that has none."""

from __future__ import annotations

import ctypes
import sys
import types

import pytest
import torch

from kvbuild.runtime import direct
from kvbuild.runtime.bound import VARYING

EXCHANGE_API = direct.exchange_api  # itself, whichever way the operators of other tests take


@pytest.mark.parametrize(
    "fault", ["no torch", "another interpreter", "no lock", "old torch", "odd torch", "new DLPack"]
)
def test_where_there_is_no_exchange_api(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (EXCHANGE_API() is not None) == hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    if fault == "no torch":
        monkeypatch.delitem(sys.modules, "torch")
    elif fault == "another interpreter":
        monkeypatch.setattr(sys, "implementation", types.SimpleNamespace(name="pypy"))
    elif fault == "no lock":
        monkeypatch.setattr(sys, "abiflags", "t")
    elif fault == "old torch":
        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=object))
    elif fault == "odd torch":
        other = types.SimpleNamespace(__dlpack_c_exchange_api__=object())
        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=other))
    else:
        monkeypatch.setattr(direct, "_DLPACK_MAJOR", 2)
    assert EXCHANGE_API() is None


def test_the_exchange_api_may_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    address = EXCHANGE_API()
    if address is None:
        pytest.skip("this torch has none")
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", address)
    assert EXCHANGE_API() == address


def test_a_launcher_without_direct_functions_serves_plainly() -> None:
    def plain() -> None: ...

    closed = ctypes.c_int32(0)
    assert direct.whole(ctypes.CDLL(None), plain, closed, "cpu") is plain
    assert direct.step(ctypes.CDLL(None), plain, closed, "cpu", (1,) * 5, VARYING, 8, 128, 0.0) is plain
