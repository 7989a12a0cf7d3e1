"""Times a bundle's tile configs on a GPU at many numbers of outputs, beside a plain read of the bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...kernels.gpgpu.route import Tile
from ..choice import Candidate
from . import ceiling, timing
from .rotation import Windows
from .timing import Timing

# The largest launch holds as many rows as the largest workload.
MOST_ROWS = 131072
# At least so many calls in a graph, so that a replay's own cost is spread thin.
CALLS = 8


@dataclass(frozen=True)
class Effort:
    """How much is measured. step: the factor between numbers of outputs; cold_bytes: what a graph reads at
    least, more than any L2; screen, replays: of each graph, first and for the finalists; finalists: at most;
    probes: further numbers of outputs tried at each border between two rows."""

    step: int
    cold_bytes: int
    screen: int
    replays: int
    finalists: int
    probes: int


FULL = Effort(step=2, cold_bytes=256 << 20, screen=5, replays=30, finalists=8, probes=2)
QUICK = Effort(step=4, cold_bytes=128 << 20, screen=3, replays=12, finalists=4, probes=0)
# A candidate that is so much slower than the best one in its first replay is out.
HOPELESS = 1.5
# And so much slower than the best one of the screening is no finalist.
CLOSE = 1.15


def candidates(operator: Any) -> dict[int, list[Candidate]]:
    """By ratio, the distinct tile configs of the operator's aligned variants."""
    kernels = {kernel.name: kernel for kernel in operator.target.kernels}
    found: dict[int, list[Candidate]] = {}
    for at, variant in enumerate(operator.variants):
        if variant.layout != "aligned":
            continue
        own = [kernels[name] for name in variant.kernels]
        candidate = Candidate(at, Tile(**own[0].tile.to_json()), len(own), variant.scratch_per_output,
                              max(kernel.shared for kernel in own))  # fmt: skip
        known = found.setdefault(variant.ratio, [])
        if candidate.tile not in [each.tile for each in known]:
            known.append(candidate)
    return found


def output_counts(ratio: int, effort: Effort) -> list[int]:
    """1 and its multiples by `step`, up to the largest workload's number of outputs, that one included."""
    most = MOST_ROWS // ratio
    counts = [1]
    while counts[-1] * effort.step < most:
        counts.append(counts[-1] * effort.step)
    return [*counts, most]


def finalists(screened: Mapping[Candidate, float], most: int) -> list[Candidate]:
    """The fastest half of at most `most`, and of the others that are close the simplest."""
    by_time = sorted(screened, key=lambda candidate: screened[candidate])
    fastest, others = by_time[: most // 2], by_time[most // 2 :]
    return fastest + sorted(others, key=lambda candidate: candidate.complexity)[: most - len(fastest)]


@dataclass
class Laboratory:
    """Measures the candidates of one ratio after another on one device.

    ceilings: by the bytes read, the least time of a plain read and by what. say: takes a line of progress.
    """

    operator: Any
    device: torch.device
    effort: Effort
    say: Callable[[str], None]
    ceilings: dict[int, tuple[Timing, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._reader, self.no_reader = ceiling.reader()
        self._windows: Windows | None = None

    def prepare(self, ratio: int) -> None:
        """Makes the windows of a ratio; the memory of the one before is given back first."""
        self._windows = None
        self._windows = Windows.make(ratio, MOST_ROWS // ratio, self.device)

    def measure(self, outputs: int, found: Sequence[Candidate]) -> dict[Candidate, Timing]:
        """The timings of one call with so many outputs, of every candidate that is not far behind early on.

        All candidates are screened; the closest are then replayed in turn, and only these have a place in
        the result.
        """
        arguments, rounds = self._calls(outputs)
        calls = rounds * len(arguments)

        def body() -> None:
            for _ in range(rounds):
                for each in arguments:
                    self.operator.compress(*each)

        screened: dict[Candidate, float] = {}
        graphs: dict[Candidate, Any] = {}
        try:
            for candidate in found:
                self.operator.pin(candidate.variant)
                self.operator.compress(*arguments[0])
                graph = timing.capture(body)
                best = min(screened.values(), default=float("inf"))
                first = timing.replay(graph, calls, 1, warm_up=1).median
                if first > HOPELESS * best:
                    continue
                screened[candidate] = timing.replay(graph, calls, self.effort.screen, warm_up=1).median
                graphs[candidate] = graph
                self._keep_close(screened, graphs)
        finally:
            self.operator.pin(None)
        final = finalists({each: screened[each] for each in graphs}, self.effort.finalists)
        timings = timing.replay_in_turn([graphs[each] for each in final], calls, self.effort.replays)
        return dict(zip(final, timings, strict=True))

    def _keep_close(self, screened: dict[Candidate, float], graphs: dict[Candidate, Any]) -> None:
        """Lets go of the graphs that can be no finalists any more."""
        limit = CLOSE * min(screened.values())
        for candidate in [each for each in graphs if screened[each] > limit]:
            del graphs[candidate]

    def ceiling(self, outputs: int) -> tuple[Timing, str]:
        """The least time of a plain read of as many bytes, in as many pieces, and by what."""
        assert self._windows is not None
        size = outputs * self._windows.window_bytes
        if size not in self.ceilings:
            pieces = self._windows.reads(outputs, self._windows.sets(outputs, self.effort.cold_bytes))
            rounds = self._rounds(len(pieces))
            self.ceilings[size] = ceiling.best(self._reader, pieces, rounds, self.effort.screen)
        return self.ceilings[size]

    def _calls(self, outputs: int) -> tuple[list[tuple[Any, ...]], int]:
        assert self._windows is not None
        sets = self._windows.sets(outputs, self.effort.cold_bytes)
        return [each.call_args() for each in self._windows.launches(outputs, sets)], self._rounds(sets)

    def _rounds(self, sets: int) -> int:
        return -(-CALLS // sets)
