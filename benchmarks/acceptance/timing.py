"""Device time by replayed CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

REPLAYS = 20
WARM_UP = 3


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


def replay_us(graph: torch.cuda.CUDAGraph, calls: int, replays: int = REPLAYS) -> float:
    """Median microseconds of one of the `calls` calls that the graph holds, from device events."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
             for _ in range(replays)]
    for _ in range(WARM_UP):
        graph.replay()
    for begin, end in pairs:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e3 / calls


def stream_us(body: Callable[[], object], calls: int, repeats: int = 5) -> float:
    """The same for calls made one after the other on the current stream, without a graph."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
             for _ in range(repeats)]
    body()
    for begin, end in pairs:
        torch.cuda.synchronize()
        begin.record()
        body()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e3 / calls
