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
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import IO

from . import installed, meant, targets, worker
from .errors import ToolchainError

WORKER = Path(worker.__file__)
INSTALL = "pip install 'kvbuild[compile]'"

# The interpreter may be in a container, which sees no file of ours: the worker's text comes as its first line
# of input. No space, quote or line break stands in what a command prefix has to pass on.
BOOTSTRAP = ("-c", "exec(input())")

# What reaches a compiler from the caller's environment is kept, but for what could change its output unseen.
_DROPPED_PREFIXES = ("TRITON_", "AMDGCN_", "LLVM_", "MLIR_", "NVPTX_", "PTXAS_")
_DROPPED = ("DISABLE_PTXAS_OPT", "USE_IR_LOC")

PROBE_LIMIT_S = 60.0
_MAX_SAID = 1 << 20
_VERSION = re.compile(r"[0-9]{1,6}(\.[A-Za-z0-9_.+-]{0,63})?")

Run = Callable[[Sequence[str], Mapping[str, str], str], "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Toolchain:
    """What was found for one vendor.

    command: its interpreter; origin: where that was named, "" where this interpreter was taken. versions: of
    the tools found. missing: sentences about what is not there, with the remedy. tree: of one that kvbuild
    installed, the digest of its files, all of which were compared; "" of any other.
    """

    vendor: str
    command: tuple[str, ...]
    versions: Mapping[str, str]
    missing: tuple[str, ...]
    origin: str = ""
    tree: str = ""

    def require(self) -> Toolchain:
        """Itself; ToolchainError where something is missing."""
        if self.missing:
            raise ToolchainError("\n".join(self.missing))
        return self


def first_line() -> str:
    """What an interpreter started with BOOTSTRAP is sent first: the worker, as a statement on one line."""
    return f"exec({WORKER.read_text(encoding='utf-8')!a})\n"


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    text: str = "",
    limit_s: float = PROBE_LIMIT_S,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command on `text` to its end, keeps the first MiB of what it prints, ends all that it started.

    OSError and TimeoutExpired as subprocess raises them, ValueError for words that no command can have.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin and process.stdout and process.stderr
    said = [b"", b""]
    readers = [
        threading.Thread(target=_read_start, args=(process, stream, said, index), daemon=True)
        for index, stream in enumerate((process.stdout, process.stderr))
    ]
    readers.append(threading.Thread(target=_write, args=(process.stdin, text.encode()), daemon=True))
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


def _write(stream: IO[bytes], data: bytes) -> None:
    """Writes all that the process will take: it may end, or be ended, without having read it."""
    with contextlib.suppress(OSError), stream:
        stream.write(data)


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the variables that steer compilers and interpreters behind the plan's back."""
    return {
        name: text
        for name, text in environ.items()
        if not name.startswith(_DROPPED_PREFIXES) and name not in _DROPPED
    }


def command_for(
    vendor: str, toolchains: Mapping[str, tuple[str, ...]], environ: Mapping[str, str]
) -> tuple[tuple[str, ...], str, str]:
    """The interpreter's command of a vendor, where it was named ("" where nobody named one), and the digest
    of its files where kvbuild installed it.

    KVBUILD_TOOLCHAIN_<VENDOR> comes before build.yaml's toolchains, which comes before a toolchain that
    kvbuild installed (named by its folder), which comes before this interpreter. ToolchainError: a name that
    is no command, or a damaged toolchain.
    """
    name = variable(vendor)
    if environ.get(name):
        words: tuple[str, ...] = (environ[name],)
        origin = name
    elif vendor in toolchains:
        words, origin = toolchains[vendor], f"toolchains.{vendor}.python"
    else:
        own = installed.find(vendor, environ)
        return (own.command, str(own.folder), own.tree) if own else ((sys.executable,), "", "")
    if len(words) == 1 and not os.path.exists(words[0]):
        try:
            words = tuple(shlex.split(words[0]))
        except ValueError as error:
            raise ToolchainError(f"{origin}: {words[0]!r} is not a command: {error}") from None
    return words, origin, ""


def zig_version() -> str:
    """The version of the ziglang package; ToolchainError where it is not installed."""
    try:
        return metadata.version("ziglang")
    except metadata.PackageNotFoundError:
        raise ToolchainError(f"zig, which compiles the launchers, is not installed; {INSTALL}") from None


def variable(vendor: str) -> str:
    """The environment variable that names a vendor's interpreter."""
    return f"KVBUILD_TOOLCHAIN_{vendor.upper()}"


def unread_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence about each variable that names an interpreter of a vendor that there is not."""
    read = {variable(vendor) for vendor in targets.names() if targets.load(vendor).ROUTE != "cpu"}
    unread = sorted(name for name in environ if name.startswith(variable("")) and name not in read)
    return [
        f"{name} is set, and no vendor's interpreter is looked for there: wanted one of "
        f"{', '.join(sorted(read))}{meant.vendor(name.removeprefix(variable('')))}"
        for name in unread
    ]


def tools_of(vendor: str) -> dict[str, dict[str, object]]:
    """What `worker.probe` is to look for beside Triton."""
    return {name: asdict(tool) for name, tool in targets.load(vendor).LOOKUP.items()}


def probe(
    vendor: str,
    toolchains: Mapping[str, tuple[str, ...]],
    environ: Mapping[str, str],
    runner: Run = run,
    archs: Sequence[str] | None = None,
) -> Toolchain:
    """Looks at a vendor's toolchain without compiling; what `archs` (None: all of its archs) lack of it
    becomes `missing`."""
    module = targets.load(vendor)
    each = module.ARCHS if archs is None else archs
    wanted = tuple(dict.fromkeys(tool for arch in each for tool in module.needs(arch)))
    if module.ROUTE == "cpu":
        try:
            return Toolchain(vendor, (sys.executable,), {"zig": zig_version()}, ())
        except ToolchainError as error:
            return Toolchain(vendor, (sys.executable,), {}, (str(error),))
    try:
        command, origin, tree = command_for(vendor, toolchains, environ)
    except ToolchainError as error:
        return Toolchain(vendor, (), {}, (str(error),))
    if not origin:
        found = worker.probe(tools_of(vendor))
        missing = _missing(vendor, wanted, found, f"in {command[0]}", _remedy(vendor))
        return Toolchain(vendor, command, found, missing)
    remedy = f"install {module.SDK or 'Triton'} there, or name another interpreter in {origin}"
    if Path(origin).is_absolute():  # our own, whole: something on this host keeps it from running
        again = installed.install_command(vendor)
        remedy = f"allow programs to run there, or set KVBUILD_TOOLCHAINS to another folder and: {again}"
    where = f"by {shlex.join(command)} ({origin})"
    if not command or not shutil.which(command[0], path=environ.get("PATH")):
        word = command[0] if command else "nothing"
        state = "which is no program" if command and os.path.exists(command[0]) else "which is not there"
        text = f"{vendor}: wanted a Python interpreter in {origin}, found {word}, {state}"
        return Toolchain(vendor, command, {}, (f"{text}; name one that runs",), origin)
    try:
        text = first_line() + json.dumps(tools_of(vendor)) + "\n"
        done = runner((*command, *BOOTSTRAP, "--probe"), clean_environment(environ), text)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        text = f"{vendor}: cannot be probed {where}: {error}; {remedy}"
        return Toolchain(vendor, command, {}, (text,), origin)
    unasked = [name for name, tool in module.LOOKUP.items() if not tool.arguments]
    versions = _versions(done.stdout, unasked)
    if versions is None:
        words = " ".join((done.stderr or done.stdout).split())[-400:].strip()
        said = words or f"nothing, exit {done.returncode}"
        text = f"{vendor}: wanted tool versions {where}, found: {said}; {remedy}"
        return Toolchain(vendor, command, {}, (text,), origin)
    missing = _missing(vendor, wanted, versions, where, remedy)
    return Toolchain(vendor, command, versions, missing, origin, tree)


def _remedy(vendor: str) -> str:
    """What to do where this interpreter lacks a tool and no other one was named."""
    sdk = targets.load(vendor).SDK
    if not sdk:
        return INSTALL
    if installed.recipe_of(vendor):
        return (
            f"install {sdk}: {installed.install_command(vendor)}; or name a Python that has them in "
            f"{variable(vendor)}, or as toolchains.{vendor}.python in build.yaml"
        )
    return (
        f"install {sdk}, and name the Python that has it in {variable(vendor)}, or as "
        f"toolchains.{vendor}.python in build.yaml (a path, or a command prefix such as a container run)"
    )


def _versions(text: str, unasked: Sequence[str]) -> dict[str, str] | None:
    """Versions by tool, as `worker.py --probe` prints them; None for whatever else a command may print.

    unasked: the tools of which it says no more than that they are present.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    for name, version in found.items():
        if not isinstance(version, str):
            return None
        if not (_VERSION.fullmatch(version) or (name in unasked and version == "present")):
            return None
    return found


def _missing(
    vendor: str, wanted: Sequence[str], found: Mapping[str, str], where: str, remedy: str
) -> tuple[str, ...]:
    """A sentence about the tools that are wanted and not found: where each was looked for, what to do."""
    lookup = targets.load(vendor).LOOKUP
    lacking = []
    for tool in wanted:
        if tool not in found:
            paths = lookup[tool].paths if tool in lookup else ()
            looked = ", ".join(path.replace("{triton}", ".../triton") for path in paths)
            lacking.append(f"{tool} (looked for {looked})" if looked else tool)
    if not lacking:
        return ()
    verb = "is" if len(lacking) == 1 else "are"
    return (f"{vendor}: {' and '.join(lacking)} {verb} not installed {where}; {remedy}",)
