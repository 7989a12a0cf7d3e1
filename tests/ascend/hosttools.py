"""The LLVM tools that lower a kernel's linalg IR to this host: where they are, and how they get there.

Run as a script it installs them: Debian's packages, unpacked into a folder of the build cache. Nothing is
installed into the system.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvbuild.aot.cache import default_folder

# Where those who run the tests keep what was downloaded: each test's own cache is another folder.
_KEPT = {name: text for name, text in os.environ.items() if name in ("KVBUILD_CACHE", "KVBUILD_TOOLCHAINS")}

VERSION = "19"
PACKAGES = ("mlir-19-tools", "libmlir-19", "llvm-19", "libllvm19", "lld-19")
TOOLS = ("mlir-opt", "mlir-translate", "llc")
FOLDER = f"ascend-host-tools-{VERSION}"
# Set by `make test-ascend`: what is missing is then a failure, and otherwise not looked for.
WANTED = "KVBUILD_TEST_ASCEND"
LEFT_OUT = "Ascend's stages run on this host: left to `make test-ascend`, which downloads what it takes"


@dataclass(frozen=True)
class HostTools:
    """A folder that the packages were unpacked into."""

    root: Path

    @property
    def bin(self) -> Path:
        return self.root / f"usr/lib/llvm-{VERSION}/bin"

    def environment(self) -> dict[str, str]:
        """This process's environment, with the packages' own libraries on the loader's path."""
        libraries = [str(self.bin.parent / "lib"), *map(str, self.root.glob("usr/lib/*-linux-gnu"))]
        return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(libraries)}

    def run(self, tool: str, *arguments: str, given: bytes = b"") -> bytes:
        """What one tool makes of `given`. ValueError with the tool's words where it refuses."""
        done = subprocess.run(
            [str(self.bin / tool), *arguments], input=given, capture_output=True, env=self.environment()
        )
        if done.returncode != 0:
            words = done.stderr.decode(errors="replace")[-2000:]
            raise ValueError(f"{tool}: exit {done.returncode}: {words}")
        return done.stdout


def own_environment() -> dict[str, str]:
    """This process's environment as it was before any test."""
    return {**{name: text for name, text in os.environ.items() if name != "KVBUILD_CACHE"}, **_KEPT}


def where(environ: Mapping[str, str]) -> Path:
    """Where the tools belong: KVBUILD_ASCEND_HOST_TOOLS, else a folder of the build cache."""
    named = environ.get("KVBUILD_ASCEND_HOST_TOOLS")
    return Path(named) if named else default_folder(environ) / FOLDER


def find(environ: Mapping[str, str]) -> HostTools | None:
    """The installed tools; None where one is missing."""
    tools = HostTools(where(environ))
    return tools if all((tools.bin / tool).exists() for tool in TOOLS) else None


def install(environ: Mapping[str, str]) -> HostTools:
    """Downloads and unpacks the packages; the folder appears whole or not at all."""
    target = where(environ)
    target.parent.mkdir(parents=True, exist_ok=True)
    for command in ("apt-get", "dpkg"):
        if shutil.which(command) is None:
            raise SystemExit(
                f"{command}: wanted Debian's package tools, for {', '.join(PACKAGES)}; found none. Unpack "
                f"LLVM and MLIR {VERSION} somewhere, with {', '.join(TOOLS)} in its "
                f"usr/lib/llvm-{VERSION}/bin, and name that folder in KVBUILD_ASCEND_HOST_TOOLS"
            )
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".host-tools-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        try:
            subprocess.run(["apt-get", "-q", "download", *PACKAGES], cwd=folder, check=True)
        except subprocess.CalledProcessError:
            subprocess.run(["apt-get", "-q", "update"], check=True)
            subprocess.run(["apt-get", "-q", "download", *PACKAGES], cwd=folder, check=True)
        for package in sorted(folder.glob("*.deb")):
            subprocess.run(["dpkg", "-x", str(package), str(folder / "root")], check=True)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(folder / "root", target)
    found = find(environ)
    if found is None:
        raise SystemExit(f"{target}: wanted {', '.join(TOOLS)} after installing, found one missing")
    return found


if __name__ == "__main__":
    tools = find(os.environ) or install(os.environ)
    said = tools.run("mlir-opt", "--version").decode().split("\n")
    print(f"{tools.root}: {said[0].strip()}", file=sys.stderr)
