"""Times with their spread: of replayed graphs by device events, of calls by the host's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

REPLAYS = 20
WARM_UP = 3


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call. low, high: the quartiles around the median; samples: how many there were."""

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, microseconds: Sequence[float]) -> Timing:
        """The timing of one sample or more."""
        median = statistics.median(microseconds)
        if len(microseconds) == 1:
            return cls(median, median, median, 1)
        low, _, high = statistics.quantiles(microseconds, n=4, method="inclusive")
        return cls(median, low, high, len(microseconds))

    @property
    def spread(self) -> float:
        """The distance of the quartiles."""
        return self.high - self.low

    def to_json(self) -> dict[str, Any]:
        rounded = {name: round(getattr(self, name), 4) for name in ("median", "low", "high")}
        return {**rounded, "samples": self.samples}


def capture(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The graph of what `body` launches on the current stream."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    # Not torch.cuda.graph(): it empties torch's caches each time, which a few hundred captures would feel.
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            body()
        finally:
            graph.capture_end()
    return graph


def replay(
    graph: torch.cuda.CUDAGraph, calls: int, replays: int = REPLAYS, warm_up: int = WARM_UP
) -> Timing:
    """One of the `calls` calls that the graph holds, from device events."""
    return replay_in_turn([graph], calls, replays, warm_up)[0]


def replay_in_turn(
    graphs: Sequence[Any], calls: int, replays: int = REPLAYS, warm_up: int = 1
) -> list[Timing]:
    """The same for several graphs of `calls` calls each, replayed in turn, so that a clock that drifts
    drifts for all of them."""
    events: list[list[tuple[Any, Any]]] = [
        [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
        for _ in graphs
    ]
    for _ in range(warm_up):
        for graph in graphs:
            graph.replay()
    for at in range(replays):
        for graph, pairs in zip(graphs, events, strict=True):
            begin, end = pairs[at]
            begin.record()
            graph.replay()
            end.record()
    torch.cuda.synchronize()
    return [
        Timing.of([begin.elapsed_time(end) * 1e3 / calls for begin, end in pairs]) for pairs in events
    ]


def stream(body: Callable[[], object], calls: int, repeats: int = 5) -> Timing:
    """The same for calls made one after the other on the current stream, without a graph."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
             for _ in range(repeats)]  # fmt: skip
    body()
    for begin, end in pairs:
        torch.cuda.synchronize()
        begin.record()
        body()
        end.record()
    torch.cuda.synchronize()
    return Timing.of([begin.elapsed_time(end) * 1e3 / calls for begin, end in pairs])


def until_done(
    call: Callable[[], object], wait: Callable[[], object], repeats: int, warm_up: int = 1
) -> Timing:
    """One call by the host's clock, until its result is there."""
    samples = []
    for _ in range(warm_up + repeats):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        samples.append(1e6 * (time.perf_counter() - begin))
    return Timing.of(samples[warm_up:])


def until_returned(
    call: Callable[[], object], wait: Callable[[], object], size: int, batches: int = 25
) -> tuple[Timing, float]:
    """One call by the host's clock until it returns: single calls, and the least mean of a batch.

    The device is idle when a batch of `size` calls begins and is never waited for within it; the clock's own
    cost is in the single calls and not in a batch.
    """
    singles: list[float] = []
    means: list[float] = []
    for _ in range(batches):
        wait()
        for _ in range(size):
            begin = time.perf_counter_ns()
            call()
            singles.append((time.perf_counter_ns() - begin) / 1e3)
        wait()
        begin = time.perf_counter_ns()
        for _ in range(size):
            call()
        means.append((time.perf_counter_ns() - begin) / 1e3 / size)
    wait()
    return Timing.of(singles), min(means)
