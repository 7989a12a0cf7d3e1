"""Pinning a variant: what tuning launches in place of the launcher's own choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import pytest

from kvbuild import runtime

PIN = "pin = lambda variant: kvb.answer(kvb.library.kvb_pin(0, ctypes.c_int64(variant)))\n"
# The stand-in's variants: 0 and 1 aligned up to 4 outputs and more, 2 general; 3 and 4 are of ratio 512.


@pytest.fixture
def run(run: Any) -> Any:
    """The said values and the kernels launched, once pinning is at hand."""

    def scenario(text: str) -> tuple[Any, list[str]]:
        said, calls = run(PIN + text)
        return said, [call["name"] for call in harness.launches(calls)]

    return scenario


def test_a_pinned_variant_serves_any_number_of_outputs(run: Any) -> None:
    said, launched = run(
        "said = [kvb.open()]\n"
        "for variant in (-1, 0, 1, 2, -1):\n"
        "    said += [pin(variant), *(kvb.compress(operands(num_outputs=n)) for n in (3, 9))]\n"
        "say([said, kvb.counters()])"
    )
    assert said == [[None] * 16, [10, 2, 4, 4, 2, 0, 0]]
    assert [name.removeprefix("entry_") for name in launched] == [
        "small", "large", "small", "small", "large", "large", "general", "general", "small", "large",
    ]  # fmt: skip


def test_a_call_that_the_variant_is_not_for_is_refused(run: Any) -> None:
    said, launched = run(
        "kvb.open()\n"
        "pin(0)\n"
        "said = [kvb.compress(operands(compress_ratio=512)), kvb.compress(operands(kv_cache=tensor(\n"
        "    (3, 37440), 'uint8', 0x900002, (37456, 1))))]\n"
        "pin(2)\n"
        "said += [kvb.compress(operands(compress_ratio=512)), kvb.close(), kvb.open()]\n"
        "say([*said, kvb.compress(operands())])"
    )
    assert [code for code, _ in said[:3]] == [2, 2, 2] and said[3:] == [None] * 3
    assert "variant 0 is pinned, which is for ratio 128 and the aligned layout" in said[0][1]
    assert "found a call of ratio 128 and other operands" in said[1][1]
    assert launched == ["entry_small"], "closing gives the choice back"


def test_a_variant_that_is_not_there_is_refused(run: Any) -> None:
    said, _ = run("said = [pin(0), kvb.open(), pin(5), pin(-2), pin(4)]\nsay(said)")
    assert said[0][0] == 3 and "cuda:0 is not open" in said[0][1]
    assert [said[1], said[4]] == [None, None]
    assert [each[0] for each in said[2:4]] == [2, 2]
    assert "variant: wanted -1 (each call's own choice) to 4, found 5" in said[2][1]


def test_a_cpu_operator_has_nothing_to_pin(cpu_bundle: Path) -> None:
    with runtime.load(cpu_bundle, device="cpu") as operator:
        with pytest.raises(ValueError, match="nothing to choose"):
            operator.pin(0)
        with pytest.raises(TypeError, match="variant: wanted an int"):
            operator.pin("first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="closed"):
        operator.pin(None)
