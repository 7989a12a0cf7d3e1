"""Compiles a bundle's memory-planned HIVM to the chip's code, with the hivmc of a CANN on this host.

What was built elsewhere stays as it is, the launchers included: they know kernels by name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..runtime.bundle import Bundle, open_bundle
from ..runtime.manifest import Manifest, Target
from ..runtime.staged import StageKernel
from . import bundle as bundles
from . import elf, toolchain
from .errors import BuildError, RequestError, ToolchainError

SOURCE = "module.hivm.opt.mlir"
OBJECT = "kernel.o"
COMMANDS = "commands.sh"
# As bishengir-compile calls it for Triton's kernels.
FLAGS = (
    "--enable-debug-info=false", "--enable-static-bare-ptr=true", "--enable-bin-relocation=true",
    "--enable-hivm-inject-barrier-all-sync=false", "--enable-sanitizer=false",
)  # fmt: skip
OLDEST_CANN = "8.5"

VERSION_LIMIT_S = 60.0
LIMIT_S = 600.0
_VERSION = re.compile(r"hivmc\s+([0-9][A-Za-z0-9.+-]{0,63})")
HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_MAX_SAID = 4000
_MAX_OBJECT = 256 << 20

Note = Callable[[str], None]


@dataclass(frozen=True)
class Hivmc:
    """The compiler: where it is, and the version that it says it has; where that is in no form that is known
    here, known is false and version the first line that it prints."""

    path: Path
    version: str
    known: bool = True


@dataclass(frozen=True)
class Finished:
    """What was done: the targets that were finished, the kernels compiled, by which hivmc."""

    targets: tuple[str, ...]
    kernels: int
    hivmc: Hivmc
    manifest: Manifest


def find_hivmc(environ: Mapping[str, str], named: str | None = None) -> Hivmc:
    """The hivmc to use: the named one, else that on PATH, else the CANN's that the environment names.

    ToolchainError where there is none, or it cannot be run or prints nothing.
    """
    places = [named] if named is not None else list(_places(environ))
    for place in places:
        found = shutil.which(place, path=environ.get("PATH", ""))
        if found is not None:
            return _version_of(Path(found).absolute(), environ)
    looked = ", ".join(places)
    raise ToolchainError(
        f"hivmc: wanted CANN's compiler of HIVM, found none (looked for {looked}); install the CANN toolkit "
        f"{OLDEST_CANN} or later, which has it in tools/bishengir/bin, and source its set_env.sh, or name it "
        "with --hivmc"
    )


def _places(environ: Mapping[str, str]) -> list[str]:
    places = ["hivmc"]
    # CANN's bishengir-compile lies beside it.
    other = shutil.which("bishengir-compile", path=environ.get("PATH", ""))
    if other is not None:
        places.append(str(Path(other).resolve().with_name("hivmc")))
    places += [str(Path(environ[name], "tools/bishengir/bin/hivmc")) for name in HOMES if environ.get(name)]
    return places


def _version_of(path: Path, environ: Mapping[str, str]) -> Hivmc:
    code, said = _run([str(path), "--version"], Path(os.sep), environ, VERSION_LIMIT_S)
    match = _VERSION.search(said)
    if match is not None and code == 0:
        return Hivmc(path, match[1])
    # A release that words it otherwise may compile all the same.
    lines = [text for line in said.splitlines() if (text := _label(line))]
    if not lines:
        raise ToolchainError(
            f"{path}: wanted a hivmc that says its version, found one that prints nothing (exit {code}); "
            "install another CANN toolkit, or name another with --hivmc"
        )
    return Hivmc(path, lines[0], known=False)


def _label(line: str) -> str:
    """A line as a manifest may hold it: printable ASCII, at most 256 characters."""
    return "".join(c if c.isascii() and c.isprintable() else " " for c in line).strip()[:256].strip()


def finish(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    environ: Mapping[str, str],
    hivmc: str | None = None,
    note: Note = lambda text: None,
    keep: Path | None = None,
) -> Finished:
    """Writes to `out` (which may be `source`) the bundle with every HIVM kernel compiled.

    Every blob is read before hivmc runs. note: told of each kernel before it is compiled, and of a version
    that is in no known form. keep: a folder for the HIVM and the command of each kernel that fails.
    RequestError where there is nothing to finish, or nothing can be kept there, ToolchainError without a
    hivmc, BuildError with the stage and hivmc's words for every kernel that failed; `out` then is as it was.
    """
    with open_bundle(source) as bundle:
        open_targets = [each for each in bundle.manifest.targets if is_unfinished(each)]
        if not open_targets:
            raise RequestError(_nothing_to_finish(bundle))
        blobs = {name: bundle.read(name) for name in sorted(bundle.manifest.blobs)}
        manifest = bundle.manifest
    tool = find_hivmc(environ, hivmc)
    if not tool.known:
        note(f"{tool.path} says no version that kvbuild can read; it is recorded as it came: {tool.version}")
    kept = None if keep is None else Kept(keep, tool)
    made = _compiled(open_targets, blobs, tool, environ, note, kept)
    targets = tuple(
        _finished(each, made, tool) if is_unfinished(each) else each for each in manifest.targets
    )
    compiled = {hashlib.sha256(data).hexdigest(): data for data in made.values()}
    used = {name for each in targets for name in each.blobs}
    blobs = {name: data for name, data in (blobs | compiled).items() if name in used}
    sizes = {name: len(data) for name, data in blobs.items()}
    manifest = Manifest(manifest.kvbuild, targets, sizes)
    bundles.write(out, manifest, blobs)
    return Finished(tuple(each.name for each in open_targets), len(made), tool, manifest)


class Kept:
    """What is left of kernels that fail: their HIVM, and a script of the commands that compile them."""

    def __init__(self, folder: Path, tool: Hivmc) -> None:
        self.folder, self.tool, self.count = folder, tool, 0
        with self._writing():
            folder.mkdir(parents=True, exist_ok=True)
            # Seen to be writable, and without the commands of a run before.
            (folder / COMMANDS).write_text("")
            (folder / COMMANDS).unlink()

    def add(self, what: str, text: bytes) -> None:
        """Keeps one kernel. RequestError where it cannot be written."""
        self.count += 1
        # Names come from the bundle, whoever made that.
        stem = f"{self.count}-{re.sub('[^A-Za-z0-9_.-]', '-', what)[:100]}"
        command = [str(self.tool.path), f"{stem}.mlir", *FLAGS, "-o", f"{stem}.o"]
        with self._writing():
            (self.folder / f"{stem}.mlir").write_bytes(text)
            with open(self.folder / COMMANDS, "a", encoding="utf-8") as file:
                file.write(f"{shlex.join(command)}\n")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RequestError(
                f"--keep {self.folder}: wanted a folder that can be written, found: {error.strerror}; name "
                "another"
            ) from None


class _Hang(BuildError):
    """A command that did not end."""


def is_unfinished(target: Target) -> bool:
    """Whether its kernels are HIVM still, which no device runs."""
    return target.staged is not None and target.staged.stage == "hivm"


def _nothing_to_finish(bundle: Bundle) -> str:
    done = [each.name for each in bundle.manifest.targets if each.staged is not None]
    if done:
        found = f"{', '.join(done)}, finished already; load it as it is"
    else:
        names = ", ".join(each.name for each in bundle.manifest.targets)
        found = f"{names}, which nobody has to finish; build one with `kvbuild compile --target ascend:ARCH`"
    return f"{bundle.path}: wanted a target whose kernels are HIVM, found {found}"


def _compiled(
    targets: Sequence[Target],
    blobs: Mapping[str, bytes],
    tool: Hivmc,
    environ: Mapping[str, str],
    note: Note,
    kept: Kept | None,
) -> dict[str, bytes]:
    """The object of each HIVM blob. BuildError lists all that failed, once every one was tried; what never
    ended is the last one that is."""
    kernels = [(target, kernel) for target in targets if target.staged for kernel in target.staged.kernels]
    made: dict[str, bytes] = {}
    failed: dict[str, str] = {}
    names: dict[str, list[str]] = {}  # of the kernels that failed, by hivmc's words
    for target, kernel in kernels:
        what = f"{target.name} {kernel.name}"
        if kernel.blob not in failed:
            try:
                if kernel.blob not in made:
                    note(what)
                    made[kernel.blob] = _compile(blobs[kernel.blob], tool, environ)
                _check(made[kernel.blob], kernel, tool)
                continue
            except BuildError as error:
                failed[kernel.blob] = str(error)
                if kept is not None:
                    kept.add(what, blobs[kernel.blob])
                if isinstance(error, _Hang):
                    names.setdefault(str(error), []).append(what)
                    break
        names.setdefault(failed[kernel.blob], []).append(what)
    if failed:
        every = len({kernel.blob for _, kernel in kernels})
        untried = every - len({*made, *failed})
        lines = [f"{', '.join(whose)}: {words}" for words, whose in names.items()]
        counts = f"{len(failed)} of {every} kernels failed" + f", {untried} were not tried" * bool(untried)
        lines.append(f"{counts}; no bundle was written" + (f", see {kept.folder}" if kept else ""))
        raise BuildError("\n".join(lines))
    return made


def _finished(target: Target, made: Mapping[str, bytes], tool: Hivmc) -> Target:
    assert target.staged is not None
    kernels = []
    machines: dict[int, str] = {}
    for kernel in target.staged.kernels:
        data = made[kernel.blob]
        machines.setdefault(elf.read(data).machine, kernel.name)
        kernels.append(replace(kernel, blob=hashlib.sha256(data).hexdigest()))
    if len(machines) != 1:
        found = ", ".join(f"{machine} of {name}" for machine, name in machines.items())
        raise BuildError(f"{target.name}: wanted objects for one ELF machine, found {found}")
    return replace(
        target,
        elf_machine=next(iter(machines)),
        toolchain={**target.toolchain, "hivmc": tool.version},
        staged=replace(target.staged, stage="device", kernels=tuple(kernels)),
    )


def _compile(text: bytes, tool: Hivmc, environ: Mapping[str, str]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="kvbuild-finish-") as name:
        folder = Path(name)
        try:
            (folder / SOURCE).write_bytes(text)
        except OSError as error:
            raise BuildError(
                f"{folder}: cannot be written: {error.strerror}; make room or set TMPDIR"
            ) from None
        command = [str(tool.path), SOURCE, *FLAGS, "-o", OBJECT]
        code, said = _run(command, folder, environ, LIMIT_S)
        if code != 0:
            raise BuildError(f"hivmc {tool.version} failed with exit {code}:\n{said or 'no words'}")
        return _object(folder / OBJECT, tool, said)


def _object(path: Path, tool: Hivmc, said: str) -> bytes:
    try:
        # What is no regular file may never end, or never begin.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                data = file.read(_MAX_OBJECT + 1)
                if len(data) <= _MAX_OBJECT:
                    return data
                raise BuildError(f"wanted an object of at most {_MAX_OBJECT} bytes, found more")
    except OSError:
        pass
    raise BuildError(
        f"wanted an object from hivmc {tool.version}, found none, though it ended well; it "
        f"said: {said or 'nothing'}"
    )


def _check(data: bytes, kernel: StageKernel, tool: Hivmc) -> None:
    """BuildError for what is no object that a launcher can hand to the driver."""
    try:
        found = elf.read(data)
        if found.machine in elf.REGISTERED:
            raise ValueError(f"its ELF machine is {found.machine}, {elf.REGISTERED[found.machine]}")
        if kernel.entry.encode() not in data:
            raise ValueError(f"it does not name {kernel.entry}")
    except ValueError as error:
        raise BuildError(
            f"wanted an object for the chip from hivmc {tool.version}, found another: {error}"
        ) from None


def _run(command: list[str], folder: Path, environ: Mapping[str, str], limit_s: float) -> tuple[int, str]:
    """The exit status and the last words of a command."""
    try:
        done = toolchain.run(command, environ, limit_s=limit_s, folder=folder)
    except subprocess.TimeoutExpired:
        raise _Hang(
            f"{command[0]}: wanted it to end within {limit_s:g} s, found it still at work"
        ) from None
    except OSError as error:
        raise ToolchainError(
            f"{command[0]}: cannot be run: {error.strerror}; name another with --hivmc"
        ) from None
    return done.returncode, "\n".join((done.stdout.strip(), done.stderr.strip())).strip()[-_MAX_SAID:]
