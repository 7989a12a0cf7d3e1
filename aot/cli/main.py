"""The `kvbuild` command. It imports little before it can answer an interrupt; all else is in frame.py.

Exit codes: 0 done, 1 something failed, 2 the request was wrong, 3 a toolchain is missing, 130 interrupted
(128 and the signal's number where another signal than Ctrl-C's ended it).
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    by = [signal.SIGINT]
    try:
        with _ending_as_interrupts(by):
            from . import frame

            return frame.run(arguments)
    except KeyboardInterrupt:
        return _interrupted(128 + by[-1], "--json" in arguments)


@contextlib.contextmanager
def _ending_as_interrupts(by: list[signal.Signals]) -> Iterator[None]:
    """Lets a request to end (of a CI system, a closed terminal) clean up as Ctrl-C does; notes it in `by`."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        by.append(signal.Signals(number))
        raise KeyboardInterrupt

    taken = []
    # Only the main thread may; and where someone else handles a signal, or ignores it (nohup), so it stays.
    with contextlib.suppress(ValueError):
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, interrupt)
                taken.append(number)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _interrupted(code: int, as_json: bool) -> int:
    message = "interrupted; nothing half-written was left"
    error = {"kind": "Interrupted", "message": message, "exit_code": code}
    with contextlib.suppress(OSError):
        if as_json:
            print(json.dumps({"error": error}, indent=2), flush=True)
        else:
            print(f"kvbuild: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
