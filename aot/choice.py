"""From the times of tile configs to the rows of a tuning table. Pure: facts in, decision out.

A config is taken at a number of outputs if it is the fastest there, or within noise of it. Rows are as few as
that allows; among the configs that serve a whole row, one that the ratio already uses comes first, then the
simplest. So a config that is faster by no more than noise loses to a simpler one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ..kernels.gpgpu.route import Tile

if TYPE_CHECKING:
    from .measure.timing import Timing

# Replays of one graph agree better with one another than two graphs of the same calls do.
NOISE_FLOOR = 0.005


@dataclass(frozen=True)
class Candidate:
    """One tile config as a bundle has it.

    variant: its place among the target's variants. launches: kernels a call. scratch: bytes an output.
    shared: bytes of shared memory a block, the most of its kernels.
    """

    variant: int
    tile: Tile
    launches: int
    scratch: int
    shared: int

    @property
    def complexity(self) -> tuple[int, ...]:
        """Less is simpler: no scratch, one launch, less under way at a time, fewer threads."""
        tile = self.tile
        return self.scratch, self.launches, tile.num_stages, self.shared, tile.num_warps, self.variant


Times = Mapping[Candidate, "Timing"]


@dataclass(frozen=True)
class Segment:
    """Measured numbers of outputs, `first` to `last`, that one candidate serves."""

    first: int
    last: int
    candidate: Candidate


@dataclass(frozen=True)
class Row:
    """One row of a table. max_outputs: None for no limit."""

    max_outputs: int | None
    candidate: Candidate
    reason: str


def noise(one: Timing, other: Timing) -> float:
    """Microseconds by which two timings may differ without meaning anything."""
    return max(one.spread, other.spread, NOISE_FLOOR * min(one.median, other.median))


def good(times: Times) -> frozenset[Candidate]:
    """The fastest candidate, and those within noise of it."""
    best = min(times.values(), key=lambda timing: timing.median)
    return frozenset(
        candidate for candidate, timing in times.items() if timing.median - best.median <= noise(timing, best)
    )


def simplest(candidates: Collection[Candidate]) -> Candidate:
    return min(candidates, key=lambda candidate: candidate.complexity)


def segments(points: Mapping[int, Times]) -> list[Segment]:
    """The fewest runs of neighbouring numbers of outputs that one good candidate serves each."""
    found: list[Segment] = []
    used: set[Candidate] = set()
    counts = sorted(points)
    start = 0
    while start < len(counts):
        common = good(points[counts[start]])
        end = start + 1
        while end < len(counts) and (both := common & good(points[counts[end]])):
            common = both
            end += 1
        chosen = simplest(common & used or common)
        used.add(chosen)
        found.append(Segment(counts[start], counts[end - 1], chosen))
        start = end
    return found


def borders(
    chosen: Sequence[Segment], probe: Callable[[int, tuple[Candidate, ...]], Times], probes: int
) -> list[int | None]:
    """max_outputs of each segment: between its last number and the next one's first, None for the last.

    probe: times candidates at a number of outputs that was not measured yet; asked `probes` times a border,
    each time halfway between the numbers that are known to be on either side.
    """
    limits: list[int | None] = []
    for left, right in pairwise(chosen):
        low, high = left.last, right.first
        for _ in range(probes):
            middle = (low + high) // 2
            if middle == low:
                break
            rivals = (left.candidate, right.candidate)
            if simplest(good(probe(middle, rivals))) == left.candidate:
                low = middle
            else:
                high = middle
        limits.append((low + high) // 2)
    return [*limits, None]


def rows(
    points: Mapping[int, Times],
    ceilings: Mapping[int, float],
    chosen: Sequence[Segment],
    limits: Sequence[int | None],
) -> list[Row]:
    """The table's rows with their reasons. ceilings: microseconds of a plain read, by number of outputs."""
    made = []
    for at, (segment, limit) in enumerate(zip(chosen, limits, strict=True)):
        neighbour = chosen[at + 1] if at + 1 < len(chosen) else chosen[at - 1] if at else None
        inside = {count: times for count, times in points.items() if segment.first <= count <= segment.last}
        reason = explain(segment.candidate, neighbour.candidate if neighbour else None, inside, ceilings)
        made.append(Row(limit, segment.candidate, reason))
    return made


def explain(
    candidate: Candidate,
    neighbour: Candidate | None,
    inside: Mapping[int, Times],
    ceilings: Mapping[int, float],
) -> str:
    """Which cost the row lowers, and the figures: where it gains most on what the neighbouring row runs.

    Where there is no neighbouring row, on the fastest of the others.
    """

    def rival_at(count: int) -> Candidate | None:
        others = [each for each in inside[count] if each != candidate]
        if neighbour in others:
            return neighbour
        return min(others, key=lambda each: inside[count][each].median) if others else None

    def gain(count: int) -> float:
        rival = rival_at(count)
        return 0.0 if rival is None else inside[count][rival].median / inside[count][candidate].median

    count = max(inside, key=gain)
    own = inside[count][candidate]
    text = f"{own.median:.1f} us for {count:,} output{'s' if count > 1 else ''}"
    text += f", {ceilings[count] / own.median:.2f} of the read ceiling"
    rival = rival_at(count)
    if rival is None:
        return f"the only config; {text}"
    theirs = inside[count][rival]
    text += f", against {theirs.median:.1f} with {rival.tile.tag}"
    if theirs.median - own.median <= noise(own, theirs):
        return f"within noise of {rival.tile.tag}, and simpler or in use already; {text}"
    return f"{lowers(candidate.tile, rival.tile)}; {text}"


def lowers(tile: Tile, rival: Tile) -> str:
    """The cost that a tile lowers by what sets it apart from another one."""
    if tile.form != rival.form:
        return {
            "cluster": "a cluster's blocks share an output in one launch, so few outputs fill the chip",
            "stream": "one block streams an output's whole pages, and none waits for another",
            "block": "several blocks share a window's rows, so few outputs fill the chip"
            if tile.split > 1
            else "one block an output, whose rows need no shared ring",
        }[tile.form]
    differences = (
        (tile.split, rival.split, "more blocks share a window, so few outputs fill the chip",
         "fewer states to write and merge"),
        (tile.block_d, rival.block_d, "fewer blocks to start and to join for an output",
         "more blocks an output, so few outputs fill the chip"),
        (tile.num_stages, rival.num_stages, "more bytes under way in each of the few blocks",
         "a shorter ring leaves room for more blocks on a multiprocessor"),
        (tile.num_warps, rival.num_warps, "more warps ask for rows at a time",
         "fewer warps a block leave room for more blocks"),
    )  # fmt: skip
    for own, other, more, less in differences:
        if own != other:
            return more if own > other else less
    return "the same config"
