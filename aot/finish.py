"""Compiles a bundle's memory-planned HIVM to the chip's code, with the hivmc of a CANN on this host.

What was built elsewhere stays as it is, the launchers included: they know kernels by name.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..runtime.bundle import Bundle, open_bundle
from ..runtime.manifest import Manifest, Target
from ..runtime.staged import StageKernel
from . import bundle as bundles
from . import elf
from .errors import BuildError, RequestError, ToolchainError

SOURCE = "module.hivm.opt.mlir"
OBJECT = "kernel.o"
# As bishengir-compile calls it for Triton's kernels.
FLAGS = (
    "--enable-debug-info=false", "--enable-static-bare-ptr=true", "--enable-bin-relocation=true",
    "--enable-hivm-inject-barrier-all-sync=false", "--enable-sanitizer=false",
)  # fmt: skip
OLDEST_CANN = "8.5"

VERSION_LIMIT_S = 60.0
LIMIT_S = 600.0
_VERSION = re.compile(r"hivmc\s+([0-9][A-Za-z0-9.+-]{0,63})")
_HOME = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_MAX_SAID = 4000

Note = Callable[[str], None]


@dataclass(frozen=True)
class Hivmc:
    """The compiler: where it is, and the version that it says it has."""

    path: Path
    version: str


@dataclass(frozen=True)
class Finished:
    """What was done: the targets that were finished, the kernels compiled, by which hivmc."""

    targets: tuple[str, ...]
    kernels: int
    hivmc: Hivmc
    manifest: Manifest


def find_hivmc(environ: Mapping[str, str], named: str | None = None) -> Hivmc:
    """The hivmc to use: the named one, else that on PATH, else the CANN's that the environment names.

    ToolchainError where there is none, or where it does not say its version.
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
    places += [str(Path(environ[name], "tools/bishengir/bin/hivmc")) for name in _HOME if environ.get(name)]
    return places


def _version_of(path: Path, environ: Mapping[str, str]) -> Hivmc:
    code, said = _run([str(path), "--version"], Path(os.sep), environ, VERSION_LIMIT_S)
    match = _VERSION.search(said)
    if code != 0 or match is None:
        raise ToolchainError(
            f"{path}: wanted a hivmc that says its version, found (exit {code}): {said or 'no words'}; "
            "install another CANN toolkit, or name another with --hivmc"
        )
    return Hivmc(path, match[1])


def finish(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    environ: Mapping[str, str],
    hivmc: str | None = None,
    note: Note = lambda text: None,
) -> Finished:
    """Writes to `out` (which may be `source`) the bundle with every HIVM kernel compiled.

    note: told of each kernel before it is compiled. RequestError where there is nothing to finish,
    ToolchainError without a hivmc, BuildError with the stage and hivmc's words where one fails; `out` then
    is as it was.
    """
    with open_bundle(source) as bundle:
        open_targets = [each for each in bundle.manifest.targets if _is_unfinished(each)]
        if not open_targets:
            raise RequestError(_nothing_to_finish(bundle))
        tool = find_hivmc(environ, hivmc)
        blobs: dict[str, bytes] = {}
        made: dict[str, bytes] = {}
        targets = tuple(
            _finished(bundle, each, tool, environ, made, note) if each in open_targets else each
            for each in bundle.manifest.targets
        )
        compiled = {hashlib.sha256(data).hexdigest(): data for data in made.values()}
        for name in sorted({name for each in targets for name in each.blobs}):
            blobs[name] = compiled[name] if name in compiled else bundle.read(name)
        sizes = {name: len(data) for name, data in blobs.items()}
        manifest = Manifest(bundle.manifest.kvbuild, targets, sizes)
    bundles.write(out, manifest, blobs)
    return Finished(tuple(each.name for each in open_targets), len(made), tool, manifest)


def _is_unfinished(target: Target) -> bool:
    return target.staged is not None and target.staged.stage == "hivm"


def _nothing_to_finish(bundle: Bundle) -> str:
    done = [each.name for each in bundle.manifest.targets if each.staged is not None]
    if done:
        found = f"{', '.join(done)}, finished already; load it as it is"
    else:
        names = ", ".join(each.name for each in bundle.manifest.targets)
        found = f"{names}, which nobody has to finish; build one with `kvbuild compile --target ascend:ARCH`"
    return f"{bundle.path}: wanted a target whose kernels are HIVM, found {found}"


def _finished(
    bundle: Bundle,
    target: Target,
    tool: Hivmc,
    environ: Mapping[str, str],
    made: dict[str, bytes],
    note: Note,
) -> Target:
    assert target.staged is not None
    kernels = []
    machines: dict[int, str] = {}
    for kernel in target.staged.kernels:
        what = f"{target.name} {kernel.name}"
        if kernel.blob not in made:
            note(what)
            made[kernel.blob] = _compile(what, bundle.read(kernel.blob), tool, environ)
        data = made[kernel.blob]
        machines.setdefault(_check(what, data, kernel, tool), kernel.name)
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


def _compile(what: str, text: bytes, tool: Hivmc, environ: Mapping[str, str]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="kvbuild-finish-") as name:
        folder = Path(name)
        (folder / SOURCE).write_bytes(text)
        command = [str(tool.path), SOURCE, *FLAGS, "-o", OBJECT]
        code, said = _run(command, folder, environ, LIMIT_S)
        if code != 0:
            raise BuildError(f"{what}: hivmc {tool.version} failed with exit {code}:\n{said or 'no words'}")
        try:
            return (folder / OBJECT).read_bytes()
        except OSError:
            raise BuildError(
                f"{what}: wanted an object from hivmc {tool.version}, found none, though it ended well; it "
                f"said: {said or 'nothing'}"
            ) from None


def _check(what: str, data: bytes, kernel: StageKernel, tool: Hivmc) -> int:
    """The ELF machine of an object that a launcher can hand to the driver."""
    try:
        found = elf.read(data)
        if found.machine in elf.REGISTERED:
            raise ValueError(f"its ELF machine is {found.machine}, {elf.REGISTERED[found.machine]}")
        if kernel.entry.encode() not in data:
            raise ValueError(f"it does not name {kernel.entry}")
    except ValueError as error:
        raise BuildError(
            f"{what}: wanted an object for the chip from hivmc {tool.version}, found another: {error}"
        ) from None
    return found.machine


def _run(command: list[str], folder: Path, environ: Mapping[str, str], limit_s: float) -> tuple[int, str]:
    """The exit status and the last words of a command."""
    try:
        done = subprocess.run(
            command, cwd=folder, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BuildError(
            f"{command[0]}: wanted it to end within {limit_s:g} s, found it still at work"
        ) from None
    except OSError as error:
        raise ToolchainError(
            f"{command[0]}: cannot be run: {error.strerror}; name another with --hivmc"
        ) from None
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()[-_MAX_SAID:]
