from __future__ import annotations

import io

import pytest

from kvbuild.aot import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drive(reporter: progress.Reporter) -> None:
    reporter.begin(4)
    reporter.done("[a] one", "compiled", 1.25)
    reporter.done("two", "cached", 0.0)
    reporter.done("three", "cached", 0.0)
    reporter.note("cache: [x] is damaged")
    reporter.done("four", "failed", 0.5)
    reporter.end()


def test_plain_lines_elsewhere_than_on_a_terminal() -> None:
    stream = io.StringIO()
    drive(progress.choose(stream))
    assert stream.getvalue().splitlines() == [
        "[1/4] compiled [a] one (1.2 s)",
        "cache: [x] is damaged",
        "[4/4] failed four (0.5 s)",
        "2 of 4 were in the cache",
    ]


def test_a_terminal_gets_a_bar_that_leaves_failures_and_notes_behind() -> None:
    stream = Terminal()
    reporter = progress.choose(stream)
    assert isinstance(reporter, progress.Bar)
    drive(reporter)
    assert "failed four (0.5 s)" in stream.getvalue()
    assert "cache: [x] is damaged" in stream.getvalue()


def test_silence() -> None:
    drive(progress.Silent())


def test_a_closed_stderr_hears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert isinstance(progress.choose(), progress.Silent)
