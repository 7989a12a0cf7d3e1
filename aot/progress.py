"""What a build says while it runs: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Protocol, TextIO


class Reporter(Protocol):
    """Told of each step of a build, always from the same thread."""

    def begin(self, total: int) -> None:
        """`total` units and launchers are about to be made."""

    def done(self, name: str, how: str, seconds: float) -> None:
        """One is finished; how: `compiled`, `cached` or `failed`."""

    def note(self, text: str) -> None:
        """Something the user may want to know."""

    def end(self) -> None:
        """The build is over, however it went."""


class Silent:
    """Says nothing."""

    def begin(self, total: int) -> None: ...

    def done(self, name: str, how: str, seconds: float) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...


class Lines:
    """One plain line a compiled or failed step, and one for all that were cached."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total = self._finished = self._cached = 0

    def begin(self, total: int) -> None:
        self._total = total

    def done(self, name: str, how: str, seconds: float) -> None:
        self._finished += 1
        if how == "cached":
            self._cached += 1
        else:
            self._print(f"[{self._finished}/{self._total}] {how} {name} ({seconds:.1f} s)")

    def note(self, text: str) -> None:
        self._print(text)

    def end(self) -> None:
        if self._cached:
            self._print(f"{self._cached} of {self._total} were in the cache")

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class Bar:
    """A live progress bar; failures and notes stay above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._task = self._progress.add_task("compile", total=None)

    def begin(self, total: int) -> None:
        self._progress.update(self._task, total=total)
        self._progress.start()

    def done(self, name: str, how: str, seconds: float) -> None:
        self._progress.update(self._task, advance=1, description=name)
        if how == "failed":
            self.note(f"failed {name} ({seconds:.1f} s)")

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def end(self) -> None:
        self._progress.stop()


def choose(stream: TextIO | None = None) -> Reporter:
    """A bar where the stream (stderr unless named) is a terminal, else lines."""
    stream = stream if stream is not None else sys.stderr
    if stream is None:  # closed by whoever started us
        return Silent()
    if stream.isatty():
        try:
            return Bar(stream)
        except ImportError:
            pass
    return Lines(stream)
