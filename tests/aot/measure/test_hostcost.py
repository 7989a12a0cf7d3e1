"""What a call costs by caller: a caller that fails is a reason in the table, our own failure is an error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbuild import runtime
from kvbuild.aot.measure import hostcost
from kvbuild.aot.measure.versus import JIT, OURS


def no_driver(*_: Any) -> float:
    raise OSError("libcuda.so.1: not found")


def refuse(*_: Any) -> Any:
    raise RuntimeError("this Triton knows no async_load\nand more")


@pytest.fixture
def versus(cpu_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for a GPU's measurements over this machine's cpu target."""
    monkeypatch.setattr(hostcost, "bare_us", no_driver)
    place = SimpleNamespace(is_gpu=True, device="cpu", synchronize=lambda: None)
    effort = SimpleNamespace(quick=True)
    operator = runtime.load(cpu_bundle, device="cpu")
    return SimpleNamespace(place=place, operator=operator, effort=effort, jit_call=refuse)


def test_another_callers_failure_is_a_reason_in_the_table(versus: Any) -> None:
    found = hostcost.measure(versus, lambda blob: b"")
    assert found["not_measured"] == {
        JIT: "RuntimeError: this Triton knows no async_load",
        hostcost.BARE: "libcuda.so.1: not found",
    }
    assert {OURS, hostcost.BOUND, hostcost.OPS, hostcost.ADD} <= set(found["callers"])


def test_our_own_failure_is_an_error(versus: Any) -> None:
    versus.operator = SimpleNamespace(compress=refuse, bind=versus.operator.bind)
    with pytest.raises(RuntimeError, match="async_load"):
        hostcost.measure(versus, lambda blob: b"")
