"""Measuring candidates, with time itself replaced: which are pinned, which are replayed, which are let go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvbuild.aot.choice import Candidate
from kvbuild.aot.measure import candidates, ceiling, timing
from kvbuild.aot.measure.candidates import FULL, QUICK, Laboratory, finalists, output_counts
from kvbuild.aot.measure.timing import Timing
from kvbuild.kernels.gpgpu.route import Tile


def candidate(variant: int, scratch: int = 0) -> Candidate:
    return Candidate(variant, Tile(4, 512, 1, 4, 1), 1, scratch, 0)


class Operator:
    """Remembers what was pinned when it was called."""

    def __init__(self) -> None:
        self.pinned: int | None = None
        self.calls: list[tuple[int | None, int]] = []

    def pin(self, variant: int | None) -> None:
        self.pinned = variant

    def compress(self, *arguments: Any) -> None:
        self.calls.append((self.pinned, arguments[3].shape[0]))


@pytest.fixture
def laboratory(monkeypatch: pytest.MonkeyPatch) -> tuple[Laboratory, Operator, list[Any]]:
    """A graph is the variant it launches; variant v takes 10 + v us. Also: which graphs were replayed."""
    replayed: list[Any] = []
    operator = Operator()

    def capture(body: Callable[[], object]) -> int:
        body()
        assert operator.pinned is not None
        return operator.pinned

    def in_turn(graphs: list[int], calls: int, replays: int = 1, warm_up: int = 1) -> list[Timing]:
        replayed.append((tuple(graphs), replays))
        return [Timing.of([10.0 + graph] * replays) for graph in graphs]

    monkeypatch.setattr(timing, "capture", capture)
    monkeypatch.setattr(timing, "replay_in_turn", in_turn)
    monkeypatch.setattr(ceiling, "reader", lambda: (None, "none"))
    monkeypatch.setattr(candidates, "MOST_ROWS", 1024)
    made = Laboratory(operator, torch.device("cpu"), QUICK, lambda text: None)
    made.prepare(128)
    return made, operator, replayed


def test_each_candidate_is_pinned_and_the_choice_given_back(
    laboratory: tuple[Laboratory, Operator, list[Any]],
) -> None:
    made, operator, replayed = laboratory
    found = [candidate(3), candidate(0), candidate(1)]
    timings = made.measure(2, found)
    assert {pinned for pinned, _ in operator.calls} == {0, 1, 3} and operator.pinned is None
    assert {outputs for _, outputs in operator.calls} == {2}
    # 8 windows in launches of 2: each is called in a graph twice, and once before.
    assert len(operator.calls) == 3 * (8 + 1)
    assert {each.variant: timings[each].median for each in found[1:]} == {0: 10.0, 1: 11.0}
    assert replayed[-1] == ((0, 1), QUICK.replays), "variant 3 is more than 15 % behind"


def test_what_is_far_behind_is_replayed_once(laboratory: tuple[Laboratory, Operator, list[Any]]) -> None:
    made, _, replayed = laboratory
    made.measure(1, [candidate(0), candidate(40)])
    assert [graphs for graphs, _ in replayed].count((40,)) == 1


def test_the_choice_is_given_back_after_a_failure(laboratory: tuple[Laboratory, Operator, list[Any]]) -> None:
    made, operator, _ = laboratory
    operator.compress = lambda *_: 1 / 0  # type: ignore[assignment, method-assign]
    with pytest.raises(ZeroDivisionError):
        made.measure(1, [candidate(0)])
    assert operator.pinned is None


def test_finalists_are_the_fastest_and_the_simplest() -> None:
    scratches = (9, 8, 7, 0, 3, 1)
    times = {candidate(v, scratch): 10.0 + v / 10 for v, scratch in enumerate(scratches)}
    assert [each.variant for each in finalists(times, 4)] == [0, 1, 3, 5]
    assert [each.variant for each in finalists(times, 8)] == [0, 1, 2, 3, 5, 4]


def test_numbers_of_outputs() -> None:
    assert output_counts(128, FULL) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert output_counts(256, QUICK) == [1, 4, 16, 64, 256, 512]
    assert output_counts(512, QUICK) == [1, 4, 16, 64, 256]
