"""The other ways to make a call, bound and as an operator of torch: bytes, and what each costs the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvbuild.aot.measure import timing
from kvbuild.aot.measure.bare import BareLaunch
from kvbuild.aot.measure.place import Place
from kvbuild.kernels.workloads import Inputs, Workload, make
from kvbuild.runtime.bound import FIXED, VARYING
from kvbuild.runtime.bundle import open_bundle

from . import launches
from .record import NotRun, Record

OUTPUTS = (1, 8, 32)
CALLS = 200
WHOLE_BAR_US, BOUND_BAR_US = 2.0, 1.0


def check(record: Record, operator: Any, place: Place) -> None:
    """Bytes, refusals and allocations."""
    inputs = make(Workload.decode(8, 128, 0), device=place.device)
    with record.check("callers", "a bound call: bytes, capture, a resized tensor") as found:
        _bytes(_bound(operator, own := inputs.fresh()), own, inputs, place)
        resized = inputs.with_(state_cache=inputs.state_cache.clone()).fresh()
        step = _bound(operator, resized)
        resized.state_cache.untyped_storage().resize_(0)
        try:
            step()
        except ValueError as refusal:
            found.detail = str(refusal)
        found.expect(found.detail.startswith("state_cache: "), "a step with a resized tensor was not refused")
    with record.check("callers", "torch.compile(fullgraph=True): bytes, capture"):
        from kvbuild.runtime import torch_library

        registered = torch_library.register(operator)
        compiled = torch.compile(lambda *given: registered(*given), fullgraph=True, backend="aot_eager")
        own = inputs.fresh()
        _bytes(lambda: compiled(*own.call_args()), own, inputs, place)
    with record.check("callers", f"{CALLS} calls, whole and bound: what torch allocates") as found:
        if not place.is_gpu:
            raise NotRun("torch counts its allocations on a GPU alone")
        own = inputs.fresh()
        given = own.call_args()
        for call in (lambda: operator.compress(*given), _bound(operator, own)):
            call()
            before = torch.cuda.memory_stats(place.device)["allocation.all.allocated"]
            for _ in range(CALLS):
                call()
            made = torch.cuda.memory_stats(place.device)["allocation.all.allocated"] - before
            found.expect(made == 0, f"wanted no allocation, found {made}")
        place.synchronize()


def times(record: Record, operator: Any, place: Place, bundle: Path) -> None:
    """Host time of a call by caller, beside the driver's own launch of the same kernels."""
    with record.check("callers", "host time of a call by caller") as found:
        if not place.is_gpu:
            raise NotRun("on the cpu a call is the work itself")
        rows = record.times.setdefault("callers_us", {})
        for outputs in OUTPUTS:
            rows[str(outputs)] = row = _row(operator, place, bundle, outputs)
            found.numbers[str(outputs)] = row
            found.expect(row["compress"] <= row["bare"] + WHOLE_BAR_US, f"{outputs} outputs, compress: {row}")
            found.expect(row["bound"] <= row["bare"] + BOUND_BAR_US, f"{outputs} outputs, bound: {row}")
        found.detail = "; ".join(
            f"{outputs} outputs: " + ", ".join(f"{name} {value:.2f}" for name, value in row.items())
            for outputs, row in rows.items()
        )


def _row(operator: Any, place: Place, bundle: Path, outputs: int) -> dict[str, float]:
    from kvbuild.runtime import torch_library

    inputs = make(Workload.decode(outputs, 128, 0), device=place.device)
    own = inputs.fresh()
    before = operator.counters()["launches"]
    operator.compress(*own.call_args())
    launched = operator.counters()["launches"]
    (variant,) = [each for each in operator.variants if launched[each.name] > before[each.name]]
    with open_bundle(bundle) as opened:
        raw = own.fresh()
        stream = torch.cuda.current_stream(place.device).cuda_stream
        bare = BareLaunch(opened.read, operator.target.kernels, variant, raw, stream)
    bare.launch()
    place.synchronize()
    launches.refuse_wrong(raw, own)
    given, registered = own.call_args(), torch_library.register(operator)

    def cost(call: Callable[[], object]) -> float:
        return timing.until_returned(call, place.synchronize, CALLS)[1]

    return {
        "bare": cost(bare.launch) - cost(bare.empty),
        "bound": cost(_bound(operator, own)),
        "compress": cost(lambda: operator.compress(*given)),
        "torch.ops": cost(lambda: registered(*given)),
    }


def _bound(operator: Any, inputs: Inputs) -> Callable[[], object]:
    scalars = {name: getattr(inputs, name) for name in ("block_size", "compress_ratio", "rms_norm_eps")}
    step = operator.bind(**{name: getattr(inputs, name) for name in FIXED}, **scalars)
    requests, positions, boundaries, slots = (getattr(inputs, name) for name in VARYING)
    return lambda: step(requests, positions, boundaries, slots)


def _bytes(call: Callable[[], object], own: Inputs, before: Inputs, place: Place) -> None:
    """The call's bytes, eager and replayed. Refused where one is wrong."""
    call()
    place.synchronize()
    launches.refuse_wrong(own, before)
    if not place.is_gpu:
        return
    own.kv_storage.copy_(before.kv_storage)
    graph = timing.capture(call)
    place.synchronize()
    graph.replay()
    place.synchronize()
    launches.refuse_wrong(own, before)
