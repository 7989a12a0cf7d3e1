"""Device time of the workloads and of decode steps, beside what reading the same bytes takes, and PyTorch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvbuild.aot.measure import ceiling, timing
from kvbuild.aot.measure.place import Place
from kvbuild.aot.measure.rotation import COLD_BYTES, cold_sets, rotation, slices
from kvbuild.kernels import reference
from kvbuild.kernels.contract import COMPRESS_RATIOS
from kvbuild.kernels.workloads import WORKLOADS, Inputs, Workload

from . import launches
from .record import NotRun, Record

DECODE_SETS = 8
DECODE_OUTPUTS = (1, 8, 32)
CALLS = 64
REFERENCE_REPEATS = 5

# On one H200: what a plain kernel design needs, and what reading the same bytes took in that run (us).
DESIGN = {
    "prefill-1x8192-c128": (13.5, 9.3),
    "prefill-8x16384-c128": (127.9, 119.7),
    "prefill-1x8192-c512": (15.2, 9.3),
    "prefill-8x16384-c512": (125.8, 119.7),
    "decode-8-c128": (6.6, 2.7),
}
DESIGN_CHIP = "H200"
DESIGN_SLACK = 1.05


@dataclass(frozen=True)
class Row:
    """One timed launch; times in microseconds.

    sets: distinct inputs rotated over; cold: whether they are together larger than L2.
    ours, ceiling: of a call in a replayed graph. stream: of eager calls back to back on a stream.
    reference: of one eager call of the float32 PyTorch reference, until its result is there.
    """

    name: str
    outputs: int
    ratio: int
    bytes: int
    sets: int
    cold: bool
    ours: float
    stream: float
    ceiling: float
    ceiling_by: str
    reference: float | None

    @property
    def of_ceiling(self) -> float:
        return self.ceiling / self.ours

    @property
    def speedup(self) -> float | None:
        return None if self.reference is None else self.reference / self.ours

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ceiling_over_ours": self.of_ceiling, "reference_over_ours": self.speedup}


def run(record: Record, operator: Any, place: Place, quick: bool) -> list[Row]:
    """Times everything, checks the bytes of what was timed, and holds the times against DESIGN."""
    rows: list[Row] = []
    reader: ceiling.Reader | None = None
    with record.check("speed", "kernels that read and do nothing else") as check:
        if not place.is_gpu:
            raise NotRun("device time is measured on a GPU")
        torch.cuda.set_device(place.device)
        reader = ceiling.Reader()
    if reader is None:
        return rows
    ceilings: dict[tuple[int, int, int], tuple[float, str]] = {}
    for workload, sets in _plan(quick):
        with record.check("speed", f"{workload.name}, {sets} inputs in turn") as check:
            row = _measure(operator, place, reader, ceilings, workload, sets)
            rows.append(row)
            check.numbers.update(row.to_json())
            fast = "" if row.speedup is None else f", {row.speedup:.1f} times the reference"
            check.detail = (f"{row.ours:.1f} us, reading {row.ceiling:.1f} us ({row.of_ceiling:.2f}){fast}, "
                            f"eager {row.stream:.1f} us")
    record.times["rows"] = [row.to_json() for row in rows]
    record.times["summary"] = summary(rows)
    with record.check("speed", "no slower than a plain design by more than 5 %") as check:
        if DESIGN_CHIP not in place.name:
            raise NotRun(f"the times to compare with are an {DESIGN_CHIP}'s")
        check.numbers.update(_slower(rows))
        slow = [f"{name}: {ours:.1f} us, wanted at most {most:.1f}"
                for name, (ours, most) in check.numbers.items() if ours > most]
        check.expect(not slow, "; ".join(slow))
    return rows


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Geometric means and the slowest, of the workloads and of the decode steps larger than any L2."""
    found: dict[str, Any] = {}
    for kind in ("prefill", "decode"):
        chosen = [row for row in rows if row.name.startswith(kind) and row.cold]
        if not chosen:
            continue
        slowest = min(chosen, key=lambda row: row.of_ceiling)
        found[kind] = {
            "rows": len(chosen),
            "ceiling_over_ours": _geometric_mean([row.of_ceiling for row in chosen]),
            "slowest": {"name": slowest.name, "ceiling_over_ours": slowest.of_ceiling},
        }
        speedups = [(row.speedup, row.name) for row in chosen if row.speedup is not None]
        if speedups:
            found[kind]["reference_over_ours"] = _geometric_mean([value for value, _ in speedups])
            found[kind]["least_over_reference"] = dict(zip(("reference_over_ours", "name"), min(speedups),
                                                           strict=True))
    return found


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def _slower(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """By name: our time and the most allowed, which is more where this GPU also reads more slowly."""
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        if row.name in DESIGN and row.name not in found:
            time_us, read_us = DESIGN[row.name]
            found[row.name] = row.ours, DESIGN_SLACK * time_us * max(1.0, row.ceiling / read_us)
    return found


def _plan(quick: bool) -> list[tuple[Workload, int]]:
    prefills = WORKLOADS[: 3 if quick else None]
    plan = [(workload, cold_sets(workload)) for workload in prefills]
    for ratio in COMPRESS_RATIOS[:1] if quick else COMPRESS_RATIOS:
        for outputs in DECODE_OUTPUTS:
            workload = Workload.decode(outputs, ratio, 0)
            plan += [(workload, sets) for sets in dict.fromkeys((DECODE_SETS, max(DECODE_SETS,
                                                                                  cold_sets(workload))))]
    return plan


def _measure(operator: Any, place: Place, reader: ceiling.Reader,
             ceilings: dict[tuple[int, int, int], tuple[float, str]], workload: Workload, sets: int) -> Row:
    inputs, pool = rotation(workload, place.device, sets)
    owns = [each.fresh() for each in inputs]
    arguments = [own.call_args() for own in owns]
    rounds = max(2, CALLS // sets)

    def body() -> None:
        for _ in range(rounds):
            for each in arguments:
                operator.compress(*each)

    operator.compress(*arguments[0])
    ours = timing.replay(timing.capture(body), rounds * sets).median
    stream = timing.stream(body, rounds * sets).median
    for at in {0, sets - 1}:
        launches.refuse_wrong(owns[at], inputs[at])
    key = workload.window_bytes, sets, rounds
    if key not in ceilings:
        read_in, by = ceiling.best(reader, slices(pool, workload, sets), rounds)
        ceilings[key] = read_in.median, by
    read, by = ceilings[key]
    theirs = _reference_us(place, inputs[0]) if sets * workload.window_bytes >= COLD_BYTES else None
    return Row(workload.name, workload.num_outputs, workload.compress_ratio, workload.window_bytes, sets,
               sets * workload.window_bytes >= COLD_BYTES, ours, stream, read, by, theirs)


def _reference_us(place: Place, inputs: Inputs) -> float:
    own = inputs.fresh().call_args()
    return timing.until_done(lambda: reference.compress(*own), place.synchronize, REFERENCE_REPEATS).median
