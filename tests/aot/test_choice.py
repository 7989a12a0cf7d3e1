"""The choice among timings: what is noise, what is simpler, how few rows, and the reason given."""

from __future__ import annotations

import pytest

from kvbuild.aot import choice
from kvbuild.aot.choice import Candidate, Segment
from kvbuild.aot.measure.timing import Timing
from kvbuild.kernels.gpgpu.route import Tile

STREAM1 = Candidate(0, Tile(8, 512, 1, 4, 1), 1, 0, 33000)
STREAM2 = Candidate(1, Tile(8, 512, 1, 4, 2), 1, 0, 66000)
STREAM4 = Candidate(2, Tile(8, 512, 1, 4, 4), 1, 0, 132000)
CLUSTER2 = Candidate(3, Tile(4, 64, 1, 4, 2, True), 1, 0, 33000)
CLUSTER4 = Candidate(4, Tile(4, 64, 1, 4, 4, True), 1, 0, 66000)
SPLIT = Candidate(5, Tile(4, 512, 8, 4, 2), 2, 49152, 33000)
BLOCK = Candidate(6, Tile(4, 512, 1, 4, 2), 1, 0, 33000)


def us(median: float, spread: float = 0.0) -> Timing:
    return Timing(median, median - spread / 2, median + spread / 2, 20)


@pytest.mark.parametrize(
    ("times", "wanted"),
    [
        pytest.param({STREAM1: us(10.0), STREAM4: us(9.0)}, STREAM4, id="faster wins"),
        pytest.param({STREAM1: us(9.0), STREAM4: us(9.0)}, STREAM1, id="equal: fewer stages"),
        pytest.param({STREAM1: us(9.04), STREAM4: us(9.0)}, STREAM1, id="within the floor: simpler"),
        pytest.param({STREAM1: us(9.06), STREAM4: us(9.0)}, STREAM4, id="beyond the floor: faster"),
        pytest.param({STREAM1: us(9.3), STREAM4: us(9.0, 0.31)}, STREAM1, id="within the best one's spread"),
        pytest.param({STREAM1: us(9.3, 0.31), STREAM4: us(9.0)}, STREAM1, id="within its own spread"),
        pytest.param({STREAM1: us(9.3, 0.1), STREAM4: us(9.0, 0.2)}, STREAM4, id="beyond either's spread"),
        pytest.param({SPLIT: us(9.0), CLUSTER4: us(9.0)}, CLUSTER4, id="no scratch, one launch"),
        pytest.param({STREAM4: us(9.0), CLUSTER4: us(9.0)}, CLUSTER4, id="less shared memory"),
        pytest.param({STREAM2: us(9.0), CLUSTER4: us(9.0)}, STREAM2, id="stages before shared memory"),
    ],
)
def test_one_number_of_outputs(times: dict[Candidate, Timing], wanted: Candidate) -> None:
    assert choice.segments({8: times}) == [Segment(8, 8, wanted)]


def points(**times: dict[Candidate, float]) -> dict[int, dict[Candidate, Timing]]:
    return {
        int(count[1:]): {candidate: us(median) for candidate, median in each.items()}
        for count, each in times.items()
    }


def test_rows_are_as_few_as_good_configs_allow() -> None:
    found = points(
        n1={CLUSTER4: 4.0, CLUSTER2: 4.01, SPLIT: 6.0},
        n8={CLUSTER4: 5.0, CLUSTER2: 5.5},
        n64={STREAM2: 13.0, STREAM4: 12.99, STREAM1: 20.0},
        n512={STREAM2: 60.0, STREAM4: 70.0, STREAM1: 60.1},
        n1024={STREAM2: 130.0, STREAM1: 125.0},
    )
    # At 1 the simpler CLUSTER2 would do, but CLUSTER4 serves both numbers.
    assert choice.segments(found) == [
        Segment(1, 8, CLUSTER4), Segment(64, 512, STREAM2), Segment(1024, 1024, STREAM1),
    ]  # fmt: skip


def test_a_config_in_use_already_is_kept_before_a_simpler_one() -> None:
    found = points(
        n1={STREAM2: 1.0, STREAM1: 2.0}, n2={BLOCK: 1.0, STREAM2: 2.0}, n4={STREAM2: 3.0, STREAM1: 3.0}
    )
    assert [each.candidate for each in choice.segments(found)] == [STREAM2, BLOCK, STREAM2]


def test_borders_are_sought_between_measured_numbers() -> None:
    chosen = [Segment(1, 16, CLUSTER4), Segment(64, 1024, STREAM1)]
    asked: list[int] = []

    def probe(count: int, rivals: tuple[Candidate, ...]) -> dict[Candidate, Timing]:
        assert rivals == (CLUSTER4, STREAM1)
        asked.append(count)
        return {CLUSTER4: us(count), STREAM1: us(35.0)}

    assert choice.borders(chosen, probe, 2) == [34, None]
    assert asked == [40, 28]
    assert choice.borders(chosen, probe, 0) == [40, None] and len(asked) == 2


def test_a_border_between_neighbouring_numbers_needs_no_probe() -> None:
    def probe(count: int, rivals: tuple[Candidate, ...]) -> dict[Candidate, Timing]:
        raise AssertionError("nothing lies between 1 and 2")

    assert choice.borders([Segment(1, 1, CLUSTER4), Segment(2, 2, STREAM1)], probe, 2) == [1, None]


def test_at_a_border_noise_goes_to_the_simpler_one() -> None:
    chosen = [Segment(1, 16, CLUSTER4), Segment(64, 64, STREAM1)]
    assert choice.borders(chosen, lambda *_: {CLUSTER4: us(10.0), STREAM1: us(10.0)}, 1) == [28, None]
    assert choice.borders(chosen, lambda *_: {CLUSTER4: us(10.0), STREAM1: us(11.0)}, 1) == [52, None]


def test_reasons_have_the_figures_and_the_cost() -> None:
    found = points(
        n1={CLUSTER4: 4.0, STREAM1: 9.0},
        n8={CLUSTER4: 5.0, STREAM1: 9.5},
        n64={STREAM1: 12.0, STREAM2: 12.5},
    )
    chosen = choice.segments(found)
    first, last = choice.rows(found, {1: 2.0, 8: 2.5, 64: 9.0}, chosen, [36, None])
    assert (first.max_outputs, first.candidate, last.max_outputs) == (36, CLUSTER4, None)
    assert first.reason == (
        "a cluster's blocks share an output in one launch, so few outputs fill the chip; "
        "4.0 us for 1 output, 0.50 of the read ceiling, against 9.0 with t8d512s1w4n1"
    )
    # Its neighbour CLUSTER4 was no finalist there; the next best is what it is held against.
    assert last.reason == (
        "a shorter ring leaves room for more blocks on a multiprocessor; 12.0 us for 64 outputs, "
        "0.75 of the read ceiling, against 12.5 with t8d512s1w4n2"
    )


def test_a_config_that_is_merely_simpler_says_so() -> None:
    found = points(n8={STREAM1: 9.02, STREAM2: 9.0})
    (row,) = choice.rows(found, {8: 4.5}, choice.segments(found), [None])
    assert row.reason.startswith("within noise of t8d512s1w4n2, and simpler or in use already; 9.0 us")
    (only,) = choice.rows(points(n8={BLOCK: 9.0}), {8: 4.5}, [Segment(8, 8, BLOCK)], [None])
    assert only.reason == "the only config; 9.0 us for 8 outputs, 0.50 of the read ceiling"


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (STREAM4, STREAM1, "more bytes under way"),
        (STREAM1, STREAM4, "a shorter ring"),
        (SPLIT, BLOCK, "more blocks share a window"),
        (BLOCK, SPLIT, "fewer states"),
        (STREAM1, CLUSTER2, "whole pages"),
        (BLOCK, STREAM1, "no shared ring"),
    ],
)
def test_the_cost_that_is_lowered(one: Candidate, other: Candidate, words: str) -> None:
    assert words in choice.lowers(one.tile, other.tile)
