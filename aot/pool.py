"""Worker processes: units in, artifacts or the compiler's words out, several at once."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .plan import Unit
from .toolchain import BOOTSTRAP, clean_environment, first_line

UNIT_LIMIT_S = 900.0

_MAX_ANSWER = 16 << 20
_MAX_FACT = 2**31 - 1
# Ascend's Triton writes the kind of core behind the name; such an entry is read from the HIVM itself.
_ENTRY = re.compile(r"[A-Za-z0-9_.$]{1,256}( ai[cv]| mix)?")
_FACTS: Mapping[str, type] = {
    "entry": str, "shared": int, "num_warps": int, "num_ctas": int,
    "global_scratch": int, "profile_scratch": int,
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """A finished unit: its binary, and the worker's facts about it (worker.py lists them)."""

    unit: Unit
    data: bytes
    facts: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True)
class Failed:
    """A unit that gave no binary, and why, in the compiler's words where it had any."""

    unit: Unit
    error: str
    seconds: float


class _Died(Exception):
    """A worker ended, or gave no answer, in the middle of a unit."""


def checked_answer(answer: object) -> dict[str, Any]:
    """A worker's answer, if it is one; else ValueError."""
    if not isinstance(answer, dict) or not isinstance(answer.get("ok"), bool):
        raise ValueError("wanted an object with ok true or false")
    for name, kind in (_FACTS if answer["ok"] else {"error": str}).items():
        found = answer.get(name)
        if type(found) is not kind:
            raise ValueError(f"wanted {name} of type {kind.__name__}, found {found!r}")
        if isinstance(found, int) and not 0 <= found <= _MAX_FACT:
            raise ValueError(f"wanted {name} from 0 to {_MAX_FACT}, found {found}")
    if answer["ok"] and not _ENTRY.fullmatch(answer["entry"]):
        raise ValueError(f"wanted an entry's name, found {answer['entry'][:80]!r}")
    return answer


def with_binary(answer: dict[str, Any]) -> dict[str, Any]:
    """A checked answer with its binary's bytes in place of their base64. ValueError where there are none."""
    if not answer["ok"]:
        return answer
    if not isinstance(answer.get("binary"), str) or not answer["binary"]:
        raise ValueError("wanted a binary in base64")
    return {**answer, "binary": base64.b64decode(answer["binary"], validate=True)}


class _Worker:
    def __init__(self, command: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        self._command = shlex.join(command)
        self._first = first_line()
        with open(folder / "stderr", "wb") as log:
            self._log = Path(log.name)
            # A session of its own: Ctrl-C reaches the builder alone, which then kills the whole group.
            self._process = subprocess.Popen(
                (*command, *BOOTSTRAP),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
                errors="replace",
                env={**clean_environment(environ), "TMPDIR": str(folder), "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )

    def ask(self, request: Mapping[str, object], limit_s: float) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        was_late = threading.Event()

        def stop() -> None:
            was_late.set()
            self.kill()

        late = threading.Timer(limit_s, stop)
        late.daemon = True
        late.start()
        try:
            self._process.stdin.write(self._first + json.dumps(request) + "\n")
            self._first = ""
            self._process.stdin.flush()
            answer = self._process.stdout.readline(_MAX_ANSWER)
        except OSError:
            answer = ""
        finally:
            late.cancel()
        try:
            found = checked_answer(json.loads(answer))
            if found.get("id") != request["id"]:
                # A line too many, and every later answer would be taken for another unit's.
                raise ValueError("it is to another request")
            return with_binary(found)
        except (ValueError, RecursionError) as error:
            if answer:
                self.kill()
                self._process.wait()
                raise _Died(
                    f"the worker ({self._command}) wrote what is no answer: {answer[:200]!r} ({error})"
                ) from None
            self.kill()
            code = self._process.wait()
            if was_late.is_set():
                raise _Died(f"no answer within {limit_s:.0f} s; the worker was stopped") from None
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            )
            said = self._log.read_text(errors="replace").strip()[-2000:]
            text = f"the worker ({self._command}) {how}" + (f"; it said:\n{said}" if said else "")
            raise _Died(text) from None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the worker in its own time (it removes its files), at most a few seconds."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self._process.stdout.close()


class Pool:
    """Up to `jobs` workers at once; each is started when it is first needed and imports Triton once."""

    def __init__(
        self,
        commands: Mapping[str, tuple[str, ...]],
        sources: Mapping[str, str],
        jobs: int,
        environ: Mapping[str, str],
        limit_s: float = UNIT_LIMIT_S,
    ) -> None:
        self._commands = commands
        self._sources = sources
        self._jobs = max(1, jobs)
        self._environ = environ
        self._limit_s = limit_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._running: set[_Worker] = set()

    def run(self, units: Sequence[Unit]) -> Generator[Compiled | Failed, None, None]:
        """Yields each unit's outcome as it is finished. Leaving the iterator early kills the workers."""
        if not units:
            return
        # Neighbours share a vendor, so that a worker is seldom changed for another interpreter's.
        waiting: queue.SimpleQueue[Unit] = queue.SimpleQueue()
        for unit in sorted(units, key=lambda unit: (unit.vendor, unit.arch)):
            waiting.put(unit)
        finished: queue.SimpleQueue[Compiled | Failed | BaseException] = queue.SimpleQueue()
        with tempfile.TemporaryDirectory(prefix="kvbuild-") as folder:
            threads = [
                threading.Thread(target=self._work, args=(Path(folder, str(i)), waiting, finished.put))
                for i in range(min(self._jobs, len(units)))
            ]
            for thread in threads:
                thread.start()
            whole = False
            try:
                for _ in units:
                    outcome = finished.get()
                    if isinstance(outcome, BaseException):
                        raise outcome
                    yield outcome
                whole = True
            finally:
                self._stop.set()
                with self._lock:
                    for worker in () if whole else self._running:
                        worker.kill()
                for thread in threads:
                    thread.join()

    def _work(
        self,
        folder: Path,
        waiting: queue.SimpleQueue[Unit],
        finished: Callable[[Compiled | Failed | BaseException], None],
    ) -> None:
        folder.mkdir()
        worker: _Worker | None = None
        vendor = ""
        try:
            while not self._stop.is_set():
                try:
                    unit = waiting.get_nowait()
                except queue.Empty:
                    break
                started = time.monotonic()
                if worker is not None and unit.vendor != vendor:
                    self._end(worker)
                    worker = None
                try:
                    if worker is None:
                        worker, vendor = self._start(unit.vendor, folder), unit.vendor
                    finished(self._compile(worker, unit, started))
                except (OSError, _Died) as error:
                    if worker is not None:
                        self._end(worker)
                        worker = None
                    finished(Failed(unit, str(error), time.monotonic() - started))
        except BaseException as error:
            finished(error)
        finally:
            if worker is not None:
                self._end(worker)

    def _start(self, vendor: str, folder: Path) -> _Worker:
        with self._lock:
            if self._stop.is_set():
                raise _Died("the build was stopped")
            worker = _Worker(self._commands[vendor], self._environ, folder)
            self._running.add(worker)
            return worker

    def _end(self, worker: _Worker) -> None:
        worker.close()
        with self._lock:
            self._running.discard(worker)

    def _compile(self, worker: _Worker, unit: Unit, started: float) -> Compiled | Failed:
        answer = worker.ask(request_for(unit, self._sources), self._limit_s)
        seconds = time.monotonic() - started
        if not answer.pop("ok"):
            return Failed(unit, str(answer["error"]), seconds)
        data = answer.pop("binary")
        return Compiled(unit, data, {name: answer[name] for name in answer if name != "id"}, seconds)


def request_for(unit: Unit, sources: Mapping[str, str]) -> dict[str, object]:
    """The worker's request for a unit; sources: the text of each file the unit names."""
    return {
        "id": unit.key,
        "sources": {path: sources[path] for path, _ in unit.sources},
        "module": unit.module,
        "function": unit.function,
        "signature": unit.signature,
        "constexprs": dict(unit.constexprs),
        "divisible_by_16": unit.divisible_by_16,
        "options": dict(unit.options),
        "environment": dict(unit.environment),
        "binary": unit.binary,
        "target": unit.triton_target,
        "triton": dict(unit.toolchain)["triton"],
    }
