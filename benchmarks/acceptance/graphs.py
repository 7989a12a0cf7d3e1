"""Calls captured into a CUDA graph and replayed, alone and beside eager calls."""

from __future__ import annotations

from typing import Any

import torch

from kvbuild.aot.measure.place import Place
from kvbuild.kernels.contract import COMPRESS_RATIOS
from kvbuild.kernels.workloads import Inputs, Workload, make

from . import launches
from .record import NotRun, Record, Refused

REPLAYS = 100


def first_call(record: Record, operator: Any, place: Place) -> None:
    """To be run before any other call: a call that finds nothing loaded lazily."""
    with record.check("graphs", "an operator's first call ever, under capture") as check:
        _need_gpu(place)
        calls = operator.counters()["calls"]
        check.expect(calls == 0, f"wanted a fresh operator, found one with {calls} calls")
        inputs = make(Workload.decode(8, 128), device=place.device)
        own = inputs.fresh()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            operator.compress(*own.call_args())
        place.synchronize()
        check.expect(torch.equal(own.kv_storage, inputs.kv_storage), "the capture itself wrote into kv_cache")
        graph.replay()
        place.synchronize()
        launches.refuse_wrong(own, inputs)


def run(record: Record, operator: Any, place: Place) -> None:
    for ratio in COMPRESS_RATIOS:
        with record.check("graphs", f"ratio {ratio}, each variant replayed on new inputs") as check:
            _need_gpu(place)
            found = launches.occasions(operator.variants, ratio)
            most = max(count for _, count in found.values())
            counters = operator.counters()["launches"]
            pair = [launches.windows(most, ratio, place.device, seed) for seed in (0, 1)]
            for aligned, count in found.values():
                one, two = (launches.first(inputs if aligned else launches.padded_pages(inputs), count)
                            for inputs in pair)
                _capture_and_replay(operator, place, one, two)
            launched = operator.counters()["launches"]
            idle = [name for name in found if launched[name] == counters[name]]
            check.expect(not idle, f"no call launched {', '.join(idle)}")
            scratch = [variant.name for variant in operator.variants
                       if variant.name in found and variant.scratch_per_output]
            check["variants"], check["with_scratch"] = list(found), scratch
            check.detail = f"{len(found)} variants, {len(scratch)} of them with scratch"
    with record.check("graphs", f"{REPLAYS} replays while eager calls run on another stream") as check:
        _need_gpu(place)
        check.detail = _beside_eager_calls(operator, place)


def _need_gpu(place: Place) -> None:
    if not place.is_gpu:
        raise NotRun("the cpu has no graphs")


def _capture_and_replay(operator: Any, place: Place, one: Inputs, two: Inputs) -> None:
    """Two different launches of the same shapes through one graph and its buffers; then the first again."""
    # Buffers of the graph's own, for the replays overwrite them.
    buffers = one.with_(**{name: _own(getattr(one, name)) for name in _INPUTS}).fresh()
    graph = torch.cuda.CUDAGraph()
    place.synchronize()
    with torch.cuda.graph(graph):
        operator.compress(*buffers.call_args())
    for inputs in (one, two, one):
        launches.overwrite(buffers, inputs)
        graph.replay()
        place.synchronize()
        launches.refuse_wrong(buffers, inputs)
        eager = inputs.fresh()
        operator.compress(*eager.call_args())
        if not torch.equal(eager.kv_storage, buffers.kv_storage):
            raise Refused("a replay gave other bytes than an eager call")


_INPUTS = ("state_cache", "token_to_req", "positions", "boundary_token_indices", "block_table",
           "rms_norm_weight", "cos_sin_cache", "kv_slot_mapping")


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, so that it takes the same variant."""
    copy = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def _beside_eager_calls(operator: Any, place: Place) -> str:
    """A graph of aligned calls and of calls with scratch, replayed beside eager ones of both kinds."""
    ratio, count = COMPRESS_RATIOS[0], 8
    captured = launches.windows(count, ratio, place.device, 2)
    captured = [launches.judged(operator, layout) for layout in (captured, launches.padded_pages(captured))]
    eager = launches.windows(count, ratio, place.device, 3)
    eager = [launches.judged(operator, layout) for layout in (eager, launches.float_weight(eager))]
    graph = torch.cuda.CUDAGraph()
    place.synchronize()
    with torch.cuda.graph(graph):
        wrong_replayed = launches.repeat(operator, captured, 2)
    streams = place.stream(), place.stream()
    total = torch.zeros((), dtype=torch.int64, device=place.device)
    wrong_eager = torch.zeros((), dtype=torch.int64, device=place.device)
    place.synchronize()
    for _ in range(REPLAYS):
        with place.on(streams[0]):
            graph.replay()
            total += wrong_replayed
        with place.on(streams[1]):
            wrong_eager += launches.repeat(operator, eager, 2)
    place.synchronize()
    if int(total) or int(wrong_eager):
        raise Refused(f"{int(total)} wrong bytes of the replays, {int(wrong_eager)} of the eager calls")
    return f"{2 * REPLAYS} captured and {2 * REPLAYS} eager calls, every byte right"
