"""`kvbuild check`: what it runs, and that it sees every kind of wrong byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbuild.aot.cli import cases
from kvbuild.kernels import reference, verdict, workloads
from kvbuild.kernels.workloads import Workload

Run = Callable[..., Any]

CPU = torch.device("cpu")


def workload_case(workload: Workload, prefill: bool = False) -> cases.Case:
    return cases.Case(
        workload.name, lambda device, seed: workloads.make(workload, device=device, seed=seed), prefill
    )


SMALL = workload_case(Workload.decode(3, 128))


class Reference:
    """The float32 reference in the form of an operator."""

    device = "cpu"
    target = SimpleNamespace(name="reference")

    def counters(self) -> dict[str, Any]:
        return {}

    def compress(self, *arguments: Any) -> torch.Tensor:
        return reference.compress(*arguments)

    def c128_256_512_compress(self, *arguments: Any) -> torch.Tensor:
        return reference.c128_256_512_compress(*arguments)


def first_slot(arguments: tuple[Any, ...]) -> tuple[int, int]:
    """Page and offset of the first output's payload."""
    slot = int(arguments[7][arguments[3][0]])
    return slot // 64, slot % 64 * 576


class WrongByte(Reference):
    def compress(self, *arguments: Any) -> torch.Tensor:
        result = super().compress(*arguments)
        page, offset = first_slot(arguments)
        result[page, offset] += 50
        return result


class StrayByte(Reference):
    def compress(self, *arguments: Any) -> torch.Tensor:
        result = super().compress(*arguments)
        result[0, 64 * 584] ^= 1
        return result


class OutsideByte(Reference):
    def compress(self, *arguments: Any) -> torch.Tensor:
        result = super().compress(*arguments)
        before = result.as_strided((1,), (1,), result.storage_offset() - 1)
        before ^= 1
        return result


class Unsteady(Reference):
    """Right each time, by accident of a tie, but with other bytes on the second launch."""

    calls = 0

    def compress(self, *arguments: Any) -> torch.Tensor:
        result = super().compress(*arguments)
        self.calls += 1
        page, offset = first_slot(arguments)
        if self.calls == 2:
            result[page, offset] ^= 1
        return result


class WrongNewTensor(Reference):
    def c128_256_512_compress(self, *arguments: Any) -> torch.Tensor:
        result = super().c128_256_512_compress(*arguments)
        result[-1, -1] = 1
        return result


class TouchesItsInput(Reference):
    def c128_256_512_compress(self, *arguments: Any) -> torch.Tensor:
        arguments[8][0, 0] ^= 1
        return super().c128_256_512_compress(*arguments)


def test_a_right_operator_passes() -> None:
    result = cases.run(Reference(), SMALL, CPU)
    assert result.ok, result.faults
    assert (result.outputs, result.bytes_compared) == (3, 3 * 584)
    assert result.untouched_bytes > 30_000


@pytest.mark.parametrize(
    ("operator", "words"),
    [
        (WrongByte, "int8: output 0"),
        (StrayByte, "untouched: page 0"),
        (OutsideByte, "around kv_cache"),
        (Unsteady, "a second launch"),
        (WrongNewTensor, "c128_256_512_compress"),
        (TouchesItsInput, "c128_256_512_compress"),
    ],
)
def test_each_kind_of_wrong_byte_is_seen(operator: type[Reference], words: str) -> None:
    result = cases.run(operator(), SMALL, CPU)
    assert not result.ok
    assert any(words in fault for fault in result.faults), result.faults


def test_the_cases_cover_prefill_decode_and_odd_operands() -> None:
    few, many = cases.cases(False), cases.cases(True)
    assert {case.name for case in few} < {case.name for case in many}
    assert {w.name for w in workloads.WORKLOADS} <= {case.name for case in many}
    assert len({case.name for case in many}) == len(many)
    for name in ("decode-32-c512", "nonsense_indices", "random-6-c512"):
        assert any(name in case.name for case in few)


@pytest.mark.parametrize("case", cases.cases(False)[3::7], ids=lambda case: case.name)
def test_the_reference_is_right_in_cases_of_each_kind(case: cases.Case) -> None:
    result = cases.run(Reference(), case, CPU)
    assert result.ok, result.faults


def test_too_many_ties_are_not_right() -> None:
    prefill = cases.run(Reference(), workload_case(Workload(1, 1024, 128), prefill=True), CPU)
    assert prefill.reference_ties is not None
    assert cases.summarise([prefill])["ok"]
    limit = verdict.REFERENCE_FACTOR * prefill.reference_ties + verdict.REFERENCE_SLACK
    tied = replace(prefill, ties=int(limit) + 1)
    summary = cases.summarise([tied])
    assert not summary["ok"] and summary["tie_refusals"] and not summary["failed"]


@pytest.mark.parametrize(
    ("device", "home"), [("cpu", "cpu"), ("cuda:1", "cuda:1"), ("privateuseone:0", "cpu")]
)
def test_who_computes_the_oracle(device: str, home: str) -> None:
    made: list[torch.device] = []

    def make(where: torch.device, seed: int) -> Any:
        made.append(where)
        raise StopIteration

    with pytest.raises(StopIteration):
        cases.run(Reference(), cases.Case("odd", make, False), torch.device(device))
    assert made == [torch.device(home)]


def test_the_cpu_bundle_is_right(cpu_bundle: Path, kvbuild: Run) -> None:
    names = ["decode-3-c256", "block_size_3-c256", "nonsense_indices-c256"]
    chosen = [word for name in names for word in ("--workload", name)]
    done = kvbuild("check", cpu_bundle, "--device", "cpu", "--json", *chosen)
    found = json.loads(done.out)
    assert (done.code, found["ok"], found["wrong"]) == (0, True, 0), found
    assert [case["name"] for case in found["cases"]] == names
    text = kvbuild("check", cpu_bundle, "--device", "cpu", *chosen)
    assert text.code == 0 and "all cases right" in text.out


def test_a_wrong_operator_is_code_1(cpu_bundle: Path, kvbuild: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbuild import runtime

    monkeypatch.setattr(runtime, "load", lambda *_, **__: WrongByte())
    done = kvbuild("check", cpu_bundle, "--device", "cpu", "--workload", "decode-3-c128")
    assert done.code == 1
    assert "WRONG" in done.out and "int8: output 0" in done.out and "wrong: decode-3-c128" in done.out


def test_an_unknown_case_is_a_wrong_request(cpu_bundle: Path, kvbuild: Run) -> None:
    done = kvbuild("check", cpu_bundle, "--workload", "nope")
    assert done.code == 2 and "prefill-1x8192-c128" in done.err
    assert kvbuild("check", cpu_bundle, "--device", "cudda").code == 2


def test_what_an_npu_takes_is_named(cpu_bundle: Path, monkeypatch: pytest.MonkeyPatch, kvbuild: Any) -> None:
    done = kvbuild("check", cpu_bundle, "--device", "npu:0")
    assert done.code == 3 and "needs the Python package 'torch_npu'" in done.err
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    assert "pip install torch torch_npu" in kvbuild("check", cpu_bundle, "--device", "npu").err
    done = kvbuild("check", cpu_bundle, "--device", "cpu")
    assert done.code == 3 and "torch_npu" not in done.err


def test_a_case_without_an_output_is_not_called_right(cpu_bundle: Path, kvbuild: Run) -> None:
    done = kvbuild("check", cpu_bundle, "--device", "cpu", "--workload", "decode-0-c128")
    assert done.code == 0 and "all cases right" not in done.out
    assert done.out.endswith("nothing was compared: no case that was run has an output\n")
