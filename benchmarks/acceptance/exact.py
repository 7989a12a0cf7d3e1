"""Every byte: workloads, decode steps and odd launches against the oracle, and launches that must agree."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kvbuild.aot.cli import cases
from kvbuild.aot.measure.place import Place
from kvbuild.kernels import odd_cases, oracle, verdict, workloads
from kvbuild.kernels.contract import COMPRESS_RATIOS
from kvbuild.kernels.workloads import Inputs, Workload

from . import launches
from .record import Check, NotRun, Record

FAR_ROWS_BYTES = 12 << 30
CPU_COUNTS = (1, 2, 5)
MANY = 150


def run(record: Record, operator: Any, place: Place, quick: bool) -> None:
    _workloads(record, operator, place, quick)
    _decode(record, operator, place, quick)
    _odd(record, operator, place, quick)
    _far_rows(record, operator, place)
    for ratio in COMPRESS_RATIOS[:1] if quick and not place.is_gpu else COMPRESS_RATIOS:
        with record.check("equal bytes", f"ratio {ratio}, layouts, numbers of outputs, places") as check:
            _equal_bytes(check, operator, place, ratio)


def _workloads(record: Record, operator: Any, place: Place, quick: bool) -> None:
    results = []
    for workload in workloads.WORKLOADS[: 1 if quick and not place.is_gpu else 3 if quick else None]:
        with record.check("workloads", workload.name) as check:
            case = cases.Case(workload.name, partial(_make, workload), prefill=True)
            result = _examine(check, operator, place, case)
            results.append(result)
            check.expect(_passes_challenge(operator, place, workload), "the challenge's own check refused it")
    with record.check("workloads", "accepted ties, of all workloads together") as check:
        summary = cases.summarise(results)
        check.numbers.update(summary)
        check.expect(results, "no workload was run")
        check.expect(not summary["tie_refusals"], "; ".join(summary["tie_refusals"]))
        check.detail = (f"{summary['ties']} of {summary['bytes_compared']:,} bytes; the float32 reference "
                        f"has {summary['reference_ties']}")


def _make(workload: Workload, device: torch.device, seed: int) -> Inputs:
    return workloads.make(workload, device=device, seed=seed)


def _passes_challenge(operator: Any, place: Place, workload: Workload) -> bool:
    inputs = workloads.make(workload, device=place.device)
    found = operator.c128_256_512_compress(*inputs.call_args())
    return verdict.judge(found, torch.zeros_like(found), oracle.expect(*inputs.call_args())).passes_challenge


def _examine(check: Check, operator: Any, place: Place, case: cases.Case, seed: int = 0) -> cases.Result:
    result = cases.run(operator, case, place.device, seed)
    check.numbers.update(result.to_json())
    check.expect(result.ok, "; ".join(result.faults))
    return result


def _many(record: Record, operator: Any, place: Place, section: str, name: str,
          chosen: list[cases.Case]) -> None:
    """Cases that are too many for a line each."""
    with record.check(section, f"{name}: {len(chosen)} launches") as check:
        results = [cases.run(operator, case, place.device) for case in chosen]
        check["cases"] = [result.to_json() for result in results]
        wrong = [f"{result.name}: {'; '.join(result.faults[:2])}" for result in results if not result.ok]
        check.expect(not wrong, " | ".join(wrong))
        compared = sum(result.bytes_compared for result in results)
        untouched = sum(result.untouched_bytes for result in results)
        check.detail = f"{compared:,} bytes compared, {untouched:,} more unchanged"


def _decode(record: Record, operator: Any, place: Place, quick: bool) -> None:
    ratios = COMPRESS_RATIOS[:1] if quick and not place.is_gpu else COMPRESS_RATIOS
    sizes = (0, 3) if quick and not place.is_gpu else workloads.DECODE_OUTPUTS
    for padding, words in ((None, f"padded to {workloads.DECODE_LAUNCH} entries"), (0, "without padding")):
        chosen = []
        for ratio in ratios:
            for outputs in sizes:
                workload = Workload.decode(outputs, ratio, padding)
                chosen.append(cases.Case(f"{workload.name}, {words}", partial(_make, workload)))
        listed = ", ".join(map(str, sizes))
        _many(record, operator, place, "decode", f"{listed} outputs, {words}", chosen)


def _odd(record: Record, operator: Any, place: Place, quick: bool) -> None:
    for at, ratio in enumerate(COMPRESS_RATIOS):
        names = list(odd_cases.ODD_CASES)
        if quick:
            names = names[at :: len(COMPRESS_RATIOS) if place.is_gpu else 4 * len(COMPRESS_RATIOS)]
        chosen = [cases.Case(f"{name}-c{ratio}", partial(_odd_case, name, ratio)) for name in names]
        _many(record, operator, place, "odd launches", f"ratio {ratio}", chosen)
    chosen = [case for case in cases.cases(False) if case.name.startswith("random-")]
    _many(record, operator, place, "odd launches", "random operands", chosen[:1] if quick else chosen)


def _odd_case(name: str, ratio: int, device: torch.device, seed: int) -> Inputs:
    return odd_cases.odd_case(name, compress_ratio=ratio, seed=seed, device=device)


def _far_rows(record: Record, operator: Any, place: Place) -> None:
    with record.check("odd launches", "state rows past 2,097,152, where 32-bit offsets overflow"):
        if not place.is_gpu:
            raise NotRun("takes 8.6 GB of address space; run on a GPU")
        free = torch.cuda.mem_get_info(place.device)[0]
        if free < FAR_ROWS_BYTES:
            raise NotRun(f"wanted {FAR_ROWS_BYTES >> 30} GiB of free device memory, found {free >> 30}")
        for ratio in COMPRESS_RATIOS:
            inputs = odd_cases.far_rows(compress_ratio=ratio, device=place.device)
            for layout in (inputs, launches.float_weight(inputs)):
                launches.judged(operator, layout)
            del inputs, layout
            torch.cuda.empty_cache()


def _equal_bytes(check: Check, operator: Any, place: Place, ratio: int) -> None:
    """One launch of many windows is the measure; everything else must give its bytes."""
    counts = [*launches.output_counts(operator.variants, ratio), MANY] if place.is_gpu else list(CPU_COUNTS)
    counts = sorted(set(counts))
    base = launches.windows(counts[-1], ratio, place.device)
    boundaries = base.boundary_token_indices
    after = _after(operator, base)
    launches.refuse_wrong(after, base)
    measure = launches.slot_bytes(after, boundaries)
    before = launches.slot_bytes(base, boundaries)
    counters = operator.counters()["launches"]
    calls = 0

    def compare(inputs: Inputs, rows: slice, what: str) -> None:
        nonlocal calls
        found = launches.slot_bytes(_after(operator, inputs), boundaries)
        wanted = before.clone()
        wanted[rows] = measure[rows]
        calls += 1
        differing = int((found != wanted).sum())
        check.expect(differing == 0, f"{what}: {differing} bytes are not those of the launch of all windows")

    layouts = {"aligned": base} | {name: make(base) for name, make in launches.GENERAL_LAYOUTS.items()}
    layouts["other blocks"] = odd_cases.relocated(base, 1)
    layouts["other blocks, padded"] = launches.padded_pages(odd_cases.relocated(base, 2), 1)
    for name, inputs in layouts.items():
        for count in counts:
            compare(launches.first(inputs, count), slice(count), f"{name}, the first {count} outputs")
        for alone in {0, counts[-1] // 2, counts[-1] - 1}:
            one = inputs.with_(boundary_token_indices=boundaries[alone : alone + 1].clone())
            compare(one, slice(alone, alone + 1), f"{name}, output {alone} alone")
        backwards = inputs.with_(boundary_token_indices=boundaries.flip(0).contiguous())
        compare(backwards, slice(None), f"{name}, in the opposite order")

    launched = {name: count - counters[name] for name, count in operator.counters()["launches"].items()}
    wanted = [variant.name for variant in operator.variants if variant.ratio == ratio]
    check["launches"] = {name: launched[name] for name in wanted}
    check["counts"], check["calls"], check["layouts"] = counts, calls, list(layouts)
    idle = [name for name in wanted if launched[name] == 0]
    check.expect(not idle, f"no call launched {', '.join(idle)}")
    check.detail = (f"{calls} calls of {len(layouts)} layouts gave the same bytes; outputs {counts}; "
                    f"each of {len(wanted)} variants was launched")


def _after(operator: Any, inputs: Inputs) -> Inputs:
    own = inputs.fresh()
    operator.compress(*own.call_args())
    return own
