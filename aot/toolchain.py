"""The environment a vendor's units compile in: whose interpreter, which versions, what is missing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO

from . import targets, worker
from .errors import ToolchainError

WORKER = Path(worker.__file__)
INSTALL = "pip install 'kvbuild[compile]'"

# What reaches a compiler from the caller's environment is kept, but for what could change its output unseen.
_DROPPED_PREFIXES = ("TRITON_", "AMDGCN_", "LLVM_", "MLIR_", "NVPTX_", "PTXAS_")
_DROPPED = ("DISABLE_PTXAS_OPT", "USE_IR_LOC")

PROBE_LIMIT_S = 60.0
_MAX_SAID = 1 << 20
_VERSION = re.compile(r"[0-9]{1,6}(\.[A-Za-z0-9_.+-]{0,63})?")

Run = Callable[[Sequence[str], Mapping[str, str]], "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Toolchain:
    """What was found for one vendor. missing: a sentence for each tool that is not there, with the remedy."""

    vendor: str
    command: tuple[str, ...]
    versions: Mapping[str, str]
    missing: tuple[str, ...]

    def require(self) -> Toolchain:
        """Itself; ToolchainError where something is missing."""
        if self.missing:
            raise ToolchainError("\n".join(self.missing))
        return self


def run(
    command: Sequence[str], environ: Mapping[str, str], limit_s: float = PROBE_LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, keeps the first MiB of what it prints, and ends all that it started.

    OSError and TimeoutExpired as subprocess raises them, ValueError for words that no command can have.
    """
    process = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout and process.stderr
    said = [b"", b""]
    readers = [
        threading.Thread(target=_read_start, args=(process, stream, said, index), daemon=True)
        for index, stream in enumerate((process.stdout, process.stderr))
    ]
    for reader in readers:
        reader.start()
    try:
        code = process.wait(limit_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for reader in readers:
            reader.join(timeout=5)
    out, err = (text.decode("utf-8", "replace") for text in said)
    return subprocess.CompletedProcess(command, code, out, err)


def _read_start(process: subprocess.Popen[bytes], stream: IO[bytes], said: list[bytes], index: int) -> None:
    """Reads a stream to its end, or to the limit: then the process has nothing more to say to us."""
    with stream:
        said[index] = stream.read(_MAX_SAID)
        if len(said[index]) == _MAX_SAID:
            process.kill()


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the variables that steer compilers and interpreters behind the plan's back."""
    return {
        name: text
        for name, text in environ.items()
        if not name.startswith(_DROPPED_PREFIXES) and name not in _DROPPED
    }


def command_for(
    vendor: str, toolchains: Mapping[str, tuple[str, ...]], environ: Mapping[str, str]
) -> tuple[tuple[str, ...], str]:
    """The interpreter's command of a vendor, and where it was named ("" where nobody named one).

    KVBUILD_TOOLCHAIN_<VENDOR> comes before build.yaml's toolchains, which comes before this interpreter.
    """
    variable = f"KVBUILD_TOOLCHAIN_{vendor.upper()}"
    if environ.get(variable):
        words: tuple[str, ...] = (environ[variable],)
        origin = variable
    elif vendor in toolchains:
        words, origin = toolchains[vendor], f"toolchains.{vendor}.python"
    else:
        return (sys.executable,), ""
    if len(words) == 1 and not os.path.exists(words[0]):
        try:
            words = tuple(shlex.split(words[0]))
        except ValueError as error:
            raise ToolchainError(f"{origin}: {words[0]!r} is not a command: {error}") from None
    return words, origin


def zig_version() -> str:
    """The version of the ziglang package; ToolchainError where it is not installed."""
    try:
        return metadata.version("ziglang")
    except metadata.PackageNotFoundError:
        raise ToolchainError(f"zig, which compiles the launchers, is not installed; {INSTALL}") from None


def probe(
    vendor: str,
    toolchains: Mapping[str, tuple[str, ...]],
    environ: Mapping[str, str],
    runner: Run = run,
) -> Toolchain:
    """Looks at a vendor's toolchain without compiling; what is wrong with it becomes `missing`."""
    if targets.load(vendor).ROUTE == "cpu":
        try:
            return Toolchain(vendor, (sys.executable,), {"zig": zig_version()}, ())
        except ToolchainError as error:
            return Toolchain(vendor, (sys.executable,), {}, (str(error),))
    try:
        command, origin = command_for(vendor, toolchains, environ)
    except ToolchainError as error:
        return Toolchain(vendor, (), {}, (str(error),))
    if not origin:
        return _judge(vendor, command, worker.probe(), f"in {command[0]}", INSTALL)
    remedy = f"install Triton there, or name another interpreter in {origin}"
    where = f"by {shlex.join(command)} ({origin})"
    if not command or not shutil.which(command[0], path=environ.get("PATH")):
        word = command[0] if command else "nothing"
        text = f"{vendor}: wanted a Python interpreter in {origin}, found {word}, which is not there"
        return Toolchain(vendor, command, {}, (f"{text}; name one that runs",))
    try:
        done = runner((*command, str(WORKER), "--probe"), clean_environment(environ))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return Toolchain(vendor, command, {}, (f"{vendor}: cannot be probed {where}: {error}; {remedy}",))
    found = _versions(done.stdout)
    if found is None:
        said = (done.stderr or done.stdout).strip()[-400:] or f"nothing, exit {done.returncode}"
        text = f"{vendor}: wanted tool versions {where}, found: {said}; {remedy}"
        return Toolchain(vendor, command, {}, (text,))
    return _judge(vendor, command, found, where, remedy)


def _versions(text: str) -> dict[str, str] | None:
    """Versions by tool, as `worker.py --probe` prints them; None for whatever else a command may print."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    right = all(isinstance(version, str) and _VERSION.fullmatch(version) for version in found.values())
    return found if right else None


def _judge(
    vendor: str, command: tuple[str, ...], found: Mapping[str, str], where: str, remedy: str
) -> Toolchain:
    wanted = targets.load(vendor).TOOLS
    missing = tuple(
        f"{vendor}: {tool} is not installed {where}; {remedy}" for tool in wanted if tool not in found
    )
    return Toolchain(vendor, command, dict(found), missing)
