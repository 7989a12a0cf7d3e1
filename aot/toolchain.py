"""The environment a vendor's units compile in: whose interpreter, which versions, what is missing."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from . import targets, worker
from .errors import ToolchainError

WORKER = Path(worker.__file__)
INSTALL = "pip install 'kvbuild[compile]'"

# What reaches a compiler from the caller's environment is kept, but for what could change its output unseen.
_DROPPED_PREFIXES = ("TRITON_", "AMDGCN_", "LLVM_", "MLIR_", "NVPTX_", "PTXAS_")
_DROPPED = ("DISABLE_PTXAS_OPT", "USE_IR_LOC")

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


def run(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, at most a minute. OSError and TimeoutExpired as subprocess raises them."""
    return subprocess.run(
        command,
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


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
        found = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Toolchain(vendor, command, {}, (f"{vendor}: cannot be probed {where}: {error}; {remedy}",))
    except ValueError:
        said = (done.stderr or done.stdout).strip()[-400:] or f"nothing, exit {done.returncode}"
        text = f"{vendor}: wanted tool versions {where}, found: {said}; {remedy}"
        return Toolchain(vendor, command, {}, (text,))
    return _judge(vendor, command, found, where, remedy)


def _judge(
    vendor: str, command: tuple[str, ...], found: Mapping[str, str], where: str, remedy: str
) -> Toolchain:
    wanted = targets.load(vendor).TOOLS
    missing = tuple(
        f"{vendor}: {tool} is not installed {where}; {remedy}" for tool in wanted if tool not in found
    )
    return Toolchain(vendor, command, dict(found), missing)
