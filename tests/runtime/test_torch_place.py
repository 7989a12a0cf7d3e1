"""Finding where torch keeps a tensor, and not finding it where torch is built otherwise."""

from __future__ import annotations

import ctypes
import ctypes.util
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.overrides import TorchFunctionMode

from kvbuild.runtime import direct, torch_place


def find(**changes: Any) -> torch_place.Place:
    """Finds the place in torch, apart from the changes."""
    names = ("_C", "empty", "int64", "uint8", "nn", "utils")
    given = {name: getattr(torch, name) for name in names} | changes
    return torch_place.find(types.SimpleNamespace(**given), True)


def nowhere(place: torch_place.Place) -> bool:
    return bytes(place) == bytes(torch_place.Place())


def test_the_place_is_that_of_any_usual_tensor() -> None:
    place = find()
    if nowhere(place):
        pytest.skip("this torch has none")
    word = ctypes.c_size_t.from_address
    parameter = torch.nn.Parameter(torch.zeros(1))
    for tensor in (torch.zeros(3), torch.zeros(2, 2).T, parameter, torch.zeros(()).bool()):
        assert word(word(id(tensor) + place.offset).value).value == place.plain
    sparse = torch.zeros(3).to_sparse()
    assert word(word(id(sparse) + place.offset).value).value != place.plain
    assert place.place == 0 and torch_place.find(torch, False).place == 1
    assert list(place.dtypes) == [6, 3, 4, 15, 0]


def test_a_torch_without_handles_or_functions() -> None:
    class Without:
        def __init__(self, **names: Any) -> None:
            self.__dict__.update(names)

    assert nowhere(find(_C=Without(__file__=torch._C.__file__)))
    other = ctypes.util.find_library("m") or "libm.so.6"
    assert nowhere(find(_C=Without(__file__=other, _aoti=torch._C._aoti)))
    assert nowhere(find(_C=Without(__file__="/nonexistent", _aoti=torch._C._aoti)))


def test_the_keys_are_those_that_torch_gives() -> None:
    place = find()
    if nowhere(place):
        pytest.skip("this torch has none")
    word = ctypes.c_size_t.from_address
    plain = torch.zeros(3)
    functional = torch._to_functional_tensor(plain)
    for tensor, odd in ((plain, False), (torch._neg_view(plain), True), (functional, True)):
        keys = word(word(id(tensor) + place.offset).value + place.keys).value
        assert keys == torch._C._dispatch_keys(tensor).raw_repr()
        assert bool(keys & place.odd_keys) == odd
    with torch.inference_mode():
        assert not torch._C._dispatch_keys(torch.zeros(3)).raw_repr() & place.odd_keys


class Refusing(TorchFunctionMode):
    def __torch_function__(self, *arguments: object) -> None:
        raise KeyError("not now")


@pytest.mark.parametrize("mode", [Refusing, FunctionalTensorMode])
def test_a_mode_of_torch_hides_the_place_while_it_lasts(
    mode: Callable[[], AbstractContextManager[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "_places", {})
    with mode():
        assert nowhere(direct._place(True))
    assert bytes(direct._place(True)) == bytes(find())


@pytest.mark.parametrize("offsets", [(), (24,), (48,), (1 << 20,)])
def test_a_tensor_that_lies_elsewhere(offsets: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_place, "_OFFSETS", offsets)
    assert nowhere(find())


def test_tensors_that_begin_differently() -> None:
    """One of the probes is of another kind: no beginning can be relied on."""
    sparse = torch.zeros(3).to_sparse()
    assert nowhere(find(nn=types.SimpleNamespace(Parameter=lambda _: sparse)))
