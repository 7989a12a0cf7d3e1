"""What `kvbuild check` runs: the cases, one case's run, and the sum of them. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from ...kernels import odd_cases, oracle, reference, verdict, workloads
from ...kernels.contract import COMPRESS_RATIOS
from ...kernels.workloads import Inputs, Workload


@dataclass(frozen=True)
class Case:
    """One launch to check. make: its operands for a device and a seed; prefill: random normal data."""

    name: str
    make: Callable[[torch.device, int], Inputs]
    prefill: bool = False


@dataclass(frozen=True)
class Result:
    """What one case showed; counts are bytes. Byte counts are of `compress`.

    untouched_changed: bytes that belong to no output and changed, inside kv_cache or around it.
    rerun_equal: a second launch on the same input gave the same bytes.
    new_tensor_equal: c128_256_512_compress gave the same outputs in a zeroed tensor and left kv_cache alone.
    reference_ties: bytes in which the float32 PyTorch reference differs from the oracle; None: not run.
    faults: what was wrong, in words.
    """

    name: str
    outputs: int
    bytes_compared: int
    differing: int
    ties: int
    wrong: int
    untouched_bytes: int
    untouched_changed: int
    rerun_equal: bool
    new_tensor_equal: bool
    reference_ties: int | None
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


# (seed, ratio, block size) of launches with random tables, positions, slots and nonsense.
_RANDOM = ((1, 128, 8), (2, 256, 8), (3, 512, 8), (4, 128, 5), (5, 256, 64), (6, 512, 1))


def cases(everything: bool) -> tuple[Case, ...]:
    """The smallest prefill of each ratio, or all 12 workloads; decode steps; odd and random launches."""
    prefills = workloads.WORKLOADS if everything else workloads.WORKLOADS[: len(COMPRESS_RATIOS)]
    return (
        *(Case(workload.name, partial(_workload, workload), prefill=True) for workload in prefills),
        *(Case(workload.name, partial(_workload, workload)) for workload in workloads.DECODE_WORKLOADS),
        *(
            # Each ratio in turn, so that every one meets oddities without trebling the run.
            Case(f"{name}-c{ratio}", partial(_odd, name, ratio))
            for index, name in enumerate(odd_cases.ODD_CASES)
            for ratio in (COMPRESS_RATIOS[index % len(COMPRESS_RATIOS)],)
        ),
        *(
            Case(f"random-{seed}-c{ratio}", partial(_random, seed, ratio, size))
            for seed, ratio, size in _RANDOM
        ),
    )


def _workload(workload: Workload, device: torch.device, seed: int) -> Inputs:
    return workloads.make(workload, device=device, seed=seed)


def _odd(name: str, ratio: int, device: torch.device, seed: int) -> Inputs:
    return odd_cases.odd_case(name, compress_ratio=ratio, seed=seed, device=device)


def _random(number: int, ratio: int, block_size: int, device: torch.device, seed: int) -> Inputs:
    return odd_cases.random_case(
        len(_RANDOM) * seed + number, compress_ratio=ratio, block_size=block_size, device=device
    )


# Devices that compute float64, and so the oracle; an NPU's host does it for it.
_DOUBLES = ("cpu", "cuda")


def device_text(device: torch.device) -> str:
    """The device's name for people."""
    if device.type == "cpu":
        return "cpu"
    module = getattr(torch, device.type, torch.cuda)
    return f"{device} ({module.get_device_name(device)})"


def run(operator: Any, case: Case, device: torch.device, seed: int = 0) -> Result:
    """Runs one case twice in place and once into a new tensor, and judges all bytes."""
    home = device if device.type in _DOUBLES else torch.device("cpu")
    own = case.make(home, seed)
    expected = oracle.expect(*own.call_args())
    inputs = own.to(device)
    first, second, third = inputs.fresh(), inputs.fresh(), inputs.fresh()
    operator.compress(*first.call_args())
    operator.compress(*second.call_args())
    new = operator.c128_256_512_compress(*third.call_args())
    _wait(device)

    found = verdict.judge(first.kv_cache, inputs.kv_cache, expected)
    outside = verdict.changed_outside(first.kv_storage.to(home), own.kv_storage, own.kv_cache)
    rerun_equal = torch.equal(first.kv_storage, second.kv_storage)
    fresh = verdict.judge(new, torch.zeros_like(new), expected)
    new_equal = fresh.right and fresh.differing == found.differing
    new_equal &= torch.equal(third.kv_storage, inputs.kv_storage)
    faults = [str(fault) for fault in found.faults]
    if found.wrong and not faults:
        faults.append(f"{found.wrong} wrong bytes")
    if outside:
        faults.append(f"{outside} bytes around kv_cache changed")
    if not rerun_equal:
        faults.append("a second launch on the same input gave other bytes")
    if not new_equal:
        faults.append("c128_256_512_compress gave other bytes than compress, or changed kv_cache")
        faults += [str(fault) for fault in fresh.faults]
    return Result(
        name=case.name,
        outputs=found.outputs,
        bytes_compared=found.bytes_compared,
        differing=found.differing,
        ties=found.ties,
        wrong=found.wrong,
        untouched_bytes=found.untouched_bytes,
        untouched_changed=found.untouched_changed + outside,
        rerun_equal=rerun_equal,
        new_tensor_equal=new_equal,
        reference_ties=_reference_ties(own, expected) if case.prefill else None,
        faults=tuple(faults),
    )


def summarise(results: Sequence[Result]) -> dict[str, Any]:
    """The sums, and whether everything is right. Ties are held against the prefills' random normal data."""
    prefills = [result for result in results if result.reference_ties is not None]
    reference_ties = sum(result.reference_ties or 0 for result in prefills)
    ties = sum(result.ties for result in prefills)
    compared = sum(result.bytes_compared for result in prefills)
    refusals: tuple[str, ...] = ()
    if {workload.name for workload in workloads.WORKLOADS} <= {result.name for result in prefills}:
        refusals = verdict.tie_refusals(ties, compared, reference_ties)
    elif ties >= verdict.REFERENCE_FACTOR * reference_ties + verdict.REFERENCE_SLACK:
        # So few bytes allow no rate; the reference on the same input is the measure.
        refusals = (f"ties: {ties} in {compared} bytes, where the reference has {reference_ties}",)
    failed = [result.name for result in results if not result.ok]
    return {
        "bytes_compared": sum(result.bytes_compared for result in results),
        "differing": sum(result.differing for result in results),
        "ties": sum(result.ties for result in results),
        "wrong": sum(result.wrong for result in results),
        "untouched_changed": sum(result.untouched_changed for result in results),
        "reference_ties": reference_ties,
        "tie_refusals": list(refusals),
        "failed": failed,
        "ok": not failed and not refusals,
    }


def _reference_ties(inputs: Inputs, expected: oracle.Expectation) -> int:
    own = inputs.fresh()
    reference.compress(*own.call_args())
    return verdict.judge(own.kv_cache, inputs.kv_cache, expected).differing


def _wait(device: torch.device) -> None:
    module = getattr(torch, device.type, None)
    if device.type != "cpu" and module is not None:
        module.synchronize(device)
