"""What was checked and measured: printed as it comes, kept for the files that accept.py writes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


class NotRun(Exception):
    """Raised inside a check that this machine, or this bundle, gives no occasion for."""


class Refused(Exception):
    """Raised inside a check whose claim does not hold."""


@dataclass
class Check:
    """One claim. seconds: what it took; numbers: whatever it counted or measured."""

    section: str
    name: str
    status: str = PASSED
    detail: str = ""
    seconds: float = 0.0
    numbers: dict[str, Any] = field(default_factory=dict)

    def __setitem__(self, name: str, value: Any) -> None:
        self.numbers[name] = value

    def expect(self, holds: object, otherwise: str) -> None:
        """Ends the check as failed, in these words, unless `holds`."""
        if not holds:
            raise Refused(otherwise)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Record:
    """All checks so far. A check that fails does not keep the others from running."""

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self.times: dict[str, Any] = {}
        self._begin = time.perf_counter()

    @contextmanager
    def check(self, section: str, name: str) -> Iterator[Check]:
        """The body is the check: what it raises is why it failed, and ends here."""
        check = Check(section, name)
        begin = time.perf_counter()
        try:
            yield check
        except NotRun as reason:
            check.status, check.detail = NOT_RUN, str(reason)
        except Refused as reason:
            check.status, check.detail = FAILED, str(reason)
        except Exception as error:
            check.status, check.detail = FAILED, f"{type(error).__name__}: {error}"
            check.numbers["traceback"] = traceback.format_exc()
        check.seconds = round(time.perf_counter() - begin, 3)
        self.checks.append(check)
        self.say(_line(check))

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._begin:6.1f} s] {text}", flush=True)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.status == FAILED]


def _line(check: Check) -> str:
    mark = {PASSED: "ok", FAILED: "FAILED", NOT_RUN: "not run"}[check.status]
    detail = f": {check.detail}" if check.detail else ""
    return f"{mark:7}  {check.section}: {check.name} ({check.seconds:.2f} s){detail}"[:600]
