"""Toolchains that kvbuild installs itself: pinned packages in a folder of their own, whole or not at all.

A package that installs into `triton/` cannot lie beside upstream Triton, so it gets a folder of its own
and is used by an interpreter that sees that folder and its standard library, nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import targets, tree
from .cache import default_folder
from .errors import BuildError, RequestError, ToolchainError

MARKER = "toolchain.json"
# Of the marker, and of what names the folder: an older kvbuild's folder is found, and named as such.
_FORMAT, _PLACE = 2, 1
_WORK, _PACKAGES = ".tmp-", "packages"
INSTALL_LIMIT_S = 3600.0

Run = Callable[[Sequence[str], Path], "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Package:
    """One pinned package. sha256: of every file that may be installed for it, one a platform."""

    name: str
    version: str
    sha256: tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """What makes a vendor's toolchain. A vendor's target file has one as RECIPE where kvbuild can install it.

    python: the CPython its packages are built for. size: of the downloads, in words. key_files: paths in the
    folder without which it is none.
    """

    python: tuple[int, int]
    packages: tuple[Package, ...]
    size: str
    key_files: tuple[str, ...]

    @property
    def version(self) -> str:
        """The CPython, as 3.11."""
        return ".".join(map(str, self.python))

    def digest(self) -> str:
        """Names the folder: another recipe, or another machine, is another folder."""
        text = json.dumps([_PLACE, platform.machine(), asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def requirements(self) -> str:
        """As pip reads it with --require-hashes."""
        lines = []
        for package in self.packages:
            hashes = " ".join(f"--hash=sha256:{each}" for each in package.sha256)
            lines.append(f"{package.name}=={package.version} {hashes}\n")
        return "".join(lines)


@dataclass(frozen=True)
class Installed:
    """A whole toolchain. command: what starts its interpreter; tree: the digest of what was installed; fresh:
    whether this call installed it."""

    vendor: str
    folder: Path
    python: str
    tree: str
    fresh: bool = False

    @property
    def command(self) -> tuple[str, ...]:
        # -S, -s: neither this interpreter's packages nor the user's may stand in for the folder's. And what
        # Python compiled by itself is compared with nothing, so it is neither read nor written.
        no_cache = ("-B", "-X", f"pycache_prefix={os.devnull}")
        return ("env", f"PYTHONPATH={self.folder}", self.python, "-S", "-s", *no_cache)


def install_command(vendor: str) -> str:
    """What a person types to get it."""
    return f"kvbuild toolchain install {vendor}"


def recipe_of(vendor: str) -> Recipe | None:
    """The recipe in a vendor's target file, if it has one."""
    found = getattr(targets.load(vendor), "RECIPE", None)
    assert found is None or isinstance(found, Recipe)
    return found


def vendors() -> tuple[str, ...]:
    """Those whose toolchain can be installed."""
    return tuple(name for name in targets.names() if recipe_of(name))


def root(environ: Mapping[str, str]) -> Path:
    """KVBUILD_TOOLCHAINS, else a folder beside the finished units. RequestError where none is known, or
    where no interpreter could be told of it."""
    if environ.get("KVBUILD_TOOLCHAINS"):
        folder = Path(environ["KVBUILD_TOOLCHAINS"])
    else:
        try:
            folder = default_folder(environ) / "toolchains"
        except RequestError:
            raise RequestError(
                "no folder for toolchains: HOME is not set; set KVBUILD_TOOLCHAINS to a folder"
            ) from None
    try:
        folder = folder.absolute()
    except OSError:
        raise RequestError(
            f"{folder}: wanted a folder for toolchains, found that the current folder is gone; set "
            "KVBUILD_TOOLCHAINS to an absolute path"
        ) from None
    if os.pathsep in str(folder):
        # PYTHONPATH would take it for two.
        raise RequestError(
            f"{folder}: wanted a folder for toolchains without {os.pathsep!r} in its path, found "
            "one; set KVBUILD_TOOLCHAINS to another folder"
        )
    return folder


def find(vendor: str, environ: Mapping[str, str]) -> Installed | None:
    """The vendor's installed toolchain; None where there is none. ToolchainError names a damaged one."""
    recipe = recipe_of(vendor)
    if recipe is None:
        return None
    try:
        folder = root(environ).absolute() / f"{vendor}-{recipe.digest()}"
    except RequestError:
        return None
    if not os.path.lexists(folder):
        return None
    fault, python, digest = _inspect(folder, recipe)
    if fault == _OLDER:
        raise ToolchainError(
            f"{vendor}: the toolchain in {folder} {fault}; install it again: {install_command(vendor)}"
        )
    if fault:
        raise ToolchainError(
            f"{vendor}: the toolchain in {folder} is damaged and is not used: {fault}; make it anew with: "
            f"{install_command(vendor)}"
        )
    return Installed(vendor, folder, python, digest)


_OLDER = f"was made by an older kvbuild, whose {MARKER} has no digest of every file, and is not used"


def _inspect(folder: Path, recipe: Recipe) -> tuple[str, str, str]:
    """What is wrong with a toolchain ("" where nothing is), its interpreter, and the digest of its files."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        python, version = str(marker["python"]), int(marker["format"])
        wanted = tree.from_json(marker["files"]) if version == _FORMAT else {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return f"its {MARKER} is missing or cannot be read", "", ""
    if version < _FORMAT:
        return _OLDER, "", ""
    if version > _FORMAT or not set(recipe.key_files) <= set(wanted):
        return f"its {MARKER} is of another kvbuild", "", ""
    if not shutil.which(python):
        return f"its interpreter {python} is gone", "", ""
    try:
        fault = tree.difference(wanted, tree.read(folder, (MARKER,)))
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}", "", ""
    return fault, python, tree.digest(wanted)


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder and keeps what it prints; it ends with us."""
    return subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=INSTALL_LIMIT_S,
        check=False,
    )


def install(
    vendor: str,
    environ: Mapping[str, str],
    python: str | None = None,
    force: bool = False,
    say: Callable[[str], None] = lambda text: None,
    runner: Run = run,
) -> Installed:
    """The vendor's toolchain, installed where it is not there or damaged. force: in place of a whole one too.
    say: told what is being done.

    RequestError: kvbuild installs none for that vendor, the folder cannot be written, or what is there is for
    another interpreter than `python`. ToolchainError: no CPython of the version that its packages are built
    for, or no pip. BuildError: pip refused, in its words, or the disk is full.
    """
    recipe = recipe_of(vendor)
    if recipe is None:
        raise RequestError(
            f"toolchain {vendor!r}: kvbuild installs none for it; wanted {' or '.join(vendors())}"
        )
    parent = root(environ).absolute()
    try:
        found = None if force else find(vendor, environ)
    except ToolchainError as error:
        found = None
        say(str(error))
    if found is not None and python is None:
        return found
    interpreter = _interpreter(recipe, python, environ, runner)
    # What a virtual environment's name leads to can change, and the folder is for this version alone.
    real = os.path.realpath(interpreter)
    if found is not None:
        if os.path.realpath(found.python) == real:
            return found
        raise RequestError(
            f"{vendor}: wanted a toolchain for {real}, found one for {found.python} in {found.folder}; "
            "replace it with --force"
        )
    folder = parent / f"{vendor}-{recipe.digest()}"
    work = parent / f"{_WORK}{os.getpid()}-{secrets.token_hex(8)}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _tidy(parent)
        work.mkdir()
        packages = ", ".join(f"{each.name} {each.version}" for each in recipe.packages)
        say(f"installing {packages} (downloads {recipe.size}) into {folder}")
        digest = _fill(work, recipe, interpreter, real, runner)
        _publish(work, folder, recipe, force)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise (BuildError if full else RequestError)(
            f"{parent}: wanted a folder for toolchains that can be written, found: "
            f"{error.strerror or error}; {'make room, or ' * full}set KVBUILD_TOOLCHAINS to another folder"
        ) from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"pip did not end within {INSTALL_LIMIT_S:.0f} s; nothing was installed") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Installed(vendor, folder, real, digest, fresh=True)


def _tidy(parent: Path) -> None:
    """Removes what installations left that were killed: none takes as long as these are old."""
    for left in parent.glob(f"{_WORK}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.lstat().st_mtime > 2 * INSTALL_LIMIT_S:
                shutil.rmtree(left, ignore_errors=True)


def _fill(work: Path, recipe: Recipe, python: str, real: str, runner: Run) -> str:
    """Installs the packages into a folder of `work`, and last of all the marker that calls it whole. Gives
    the digest of what was installed."""
    folder, downloads, requirements = work / _PACKAGES, work / "tmp", work / "requirements.txt"
    folder.mkdir()
    downloads.mkdir()
    requirements.write_text(recipe.requirements())
    options = (
        "install", "--no-input", "--disable-pip-version-check", "--no-deps", "--no-compile", "--quiet",
        "--only-binary=:all:", "--require-hashes", "--requirement", str(requirements),
        "--target", str(folder),
    )  # fmt: skip
    # What pip downloads is gone with the rest, however pip ends.
    done = runner(("env", f"TMPDIR={downloads}", *_pip(python, folder, runner), *options), folder)
    if done.returncode:
        raise BuildError(f"pip could not install the packages; it said:\n{done.stdout.strip()[-2000:]}")
    missing = [name for name in recipe.key_files if not (folder / name).is_file()]
    if missing:
        raise BuildError(f"the packages lack {', '.join(missing)}; nothing was installed")
    files = tree.read(folder)
    marker = {"format": _FORMAT, "python": real, "files": tree.to_json(files)}
    os.sync()  # whatever is called whole must be on the disk
    with open(folder / MARKER, "x") as file:
        json.dump(marker, file, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    return tree.digest(files)


def _publish(work: Path, folder: Path, recipe: Recipe, force: bool) -> None:
    """Gives the filled folder its name, in place of a damaged one; of what another process just made only
    with `force`."""
    if os.path.lexists(folder):
        if not force and not _inspect(folder, recipe)[0]:
            return
        folder.rename(work / "damaged")
    try:
        (work / _PACKAGES).rename(folder)
    except OSError:
        if _inspect(folder, recipe)[0]:
            raise


def _pip(python: str, folder: Path, runner: Run) -> tuple[str, ...]:
    """The command of a pip that installs for that interpreter: its own, else this one's."""
    own: tuple[tuple[str, ...], ...] = (
        (python, "-m", "pip"), (sys.executable, "-m", "pip", "--python", python)
    )  # fmt: skip
    for command in own:
        if runner((*command, "--version"), folder).returncode == 0:
            return command
    raise ToolchainError(
        f"wanted pip for {python}, found none there nor in {sys.executable}; install it: "
        f"{python} -m ensurepip"
    )


def _interpreter(recipe: Recipe, named: str | None, environ: Mapping[str, str], runner: Run) -> str:
    """An interpreter of the recipe's version: the one that was named, else this one, else one on PATH."""
    candidates = [named] if named else [sys.executable, f"python{recipe.version}"]
    found = []
    for candidate in candidates:
        path = shutil.which(candidate, path=environ.get("PATH"))
        path = path and os.path.abspath(path)
        version = _python_version(path, runner) if path else "nothing there"
        if path and version == f"cpython {recipe.version} {platform.machine()}":
            return path
        found.append(f"{candidate} ({version})")
    raise ToolchainError(
        f"wanted CPython {recipe.version} for {platform.machine()}, for which alone the packages are built, "
        f"found {', '.join(found)}; install Python {recipe.version} and name it: --python PATH"
    )


def _python_version(path: str, runner: Run) -> str:
    code = (
        "import platform, sys; print(sys.implementation.name, '%d.%d' % sys.version_info[:2], "
        "platform.machine())"
    )
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = runner((path, "-c", code), Path(os.sep))
        if done.returncode == 0:
            return done.stdout.strip()[:80]
    return "no Python that runs"


def to_json(installed: Installed, recipe: Recipe) -> dict[str, Any]:
    """What `--json` prints of it."""
    return {
        "vendor": installed.vendor,
        "folder": str(installed.folder),
        "python": installed.python,
        "packages": {each.name: each.version for each in recipe.packages},
        "installed": installed.fresh,
    }
