"""An environment for each Triton of the registry: a folder a version under the cache, whole or not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvbuild.aot import toolchain
from kvbuild.aot.cache import default_folder

# The last release of each minor version that vendors' Tritons are made from, and the builder's own.
VERSIONS = ("3.0.0", "3.1.0", "3.2.0", "3.3.1", "3.4.0", "3.5.1", "3.6.0", "3.9.0")
# These import it without saying that they need it.
NEEDS_SETUPTOOLS = ("3.0.0", "3.1.0", "3.2.0")
INSTALL_LIMIT_S = 1800.0


class InstallError(Exception):
    """A version that cannot be had here, in the installer's words."""


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the environments are kept: beside the builder's finished units, never beside its packages."""
    return default_folder(environ) / "tritons"


def environment(version: str, root: Path) -> Path:
    """The interpreter that has this Triton, which is installed first where it is not there. InstallError."""
    here = Path(sys.executable)
    if found_by(here) == version:
        return here
    place = root / f"{version}-cp{sys.version_info[0]}{sys.version_info[1]}"
    python = place / "bin" / "python"
    if found_by(python) == version:
        return python
    shutil.rmtree(place, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".tmp-") as temporary:
        made = Path(temporary, "environment")
        run(sys.executable, "-m", "venv", "--without-pip", str(made))
        packages = [f"triton=={version}", *(["setuptools"] if version in NEEDS_SETUPTOOLS else [])]
        run(
            sys.executable, "-m", "pip", "--python", str(made / "bin" / "python"), "install", "--quiet",
            "--disable-pip-version-check", "--no-deps", "--no-cache-dir", "--no-compile", *packages,
        )  # fmt: skip
        made.rename(place)
    if (found := found_by(python)) != version:
        raise InstallError(f"wanted triton {version} in {place}, found {found or 'none'}")
    return python


def found_by(python: Path) -> str | None:
    """The version of the Triton that an interpreter would import; None where it has none or is not there."""
    if not python.exists():
        return None
    return toolchain.probe("nvidia", {"nvidia": (str(python),)}, os.environ).versions.get("triton")


def run(*command: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=INSTALL_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(str(error)) from None
    if done.returncode != 0:
        raise InstallError((done.stderr or done.stdout).strip()[-1000:] or f"exit {done.returncode}")
