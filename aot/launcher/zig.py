"""Compiles a launcher with the C compiler of the `ziglang` package: no system compiler is needed.

The shared object holds no path of the machine it was built on; equal inputs give equal bytes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...kernels import cpu
from ..cache import default_folder
from ..errors import BuildError, RequestError, ToolchainError
from .generate import COMMON_SOURCES, generate_table, vendor_of

HOSTS = ("x86_64-linux-gnu.2.17", "aarch64-linux-gnu.2.17")

HEADERS = (
    "acl.h", "aligned.h", "call.h", "check.h", "device.h", "driver.h", "error.h", "kvbuild.h",
    "library.h", "manifest.h", "module.h", "operands.h", "python.h", "stages.h", "stream.h", "table.h",
    "target.h", "torch.h", "workspace.h",
)  # fmt: skip
FFI_HEADERS = ("tvm/ffi/c_api.h", "tvm/ffi/extra/c_env_api.h", "dlpack/dlpack.h")

# No optimisation may contract a multiply and an add, no symbol but the interface is visible, and nothing
# that depends on the machine (paths, debug information, build ids) is kept. A launcher calls its own
# functions, also where another one has been loaded globally.
FLAGS = (
    "-std=c11", "-fPIC", "-shared", "-s", "-g0", "-ffp-contract=off", "-fno-sanitize=undefined",
    "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-Wl,--build-id=none", "-Wl,-Bsymbolic",
    "-pthread", "-ldl",
)  # fmt: skip

_HERE = Path(__file__).parent
_INSTALL = "Install it: pip install 'kvbuild[compile]'"


def build_launcher(target_table: Mapping[str, Any], host: str) -> bytes:
    """The bytes of the shared object that launches `target_table` on `host`.

    target_table: one TARGET of the manifest; its "launchers" may be absent.
    host: one of HOSTS.

    Raises ToolchainError where ziglang or apache-tvm-ffi's headers are missing, BuildError where the table
    cannot be launched or the compiler refuses.
    """
    files = _inputs(target_table, host)
    zig = _package_folder("ziglang") / "zig"
    with tempfile.TemporaryDirectory(prefix="kvbuild-launcher-") as name:
        folder = Path(name)
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        command = [str(zig), "cc", "-target", host, *_flags(target_table)]
        command += [path for path in files if path.endswith(".c")]
        command += ["-o", "launcher.so"]
        done = subprocess.run(
            command, cwd=folder, env=_environment(folder), capture_output=True, text=True, errors="replace"
        )
        if done.returncode != 0:
            target = f"{target_table['vendor']}:{target_table['arch']}"
            words = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}, no words"
            raise BuildError(f"{target}: the launcher for {host} did not compile; zig cc said:\n{words}")
        return (folder / "launcher.so").read_bytes()


def launcher_key(target_table: Mapping[str, Any], host: str) -> str:
    """The sha256 of everything a launcher is made from: sources, flags, host and compiler version.

    Reads files and package metadata only. Raises as build_launcher does, apart from the compiler's refusal.
    """
    key = hashlib.sha256()
    parts: list[tuple[str, bytes]] = [("host", host.encode()), ("zig", zig_version().encode())]
    parts.append(("flags", "\0".join(_flags(target_table)).encode()))
    parts += sorted(_inputs(target_table, host).items())
    for name, data in parts:
        key.update(f"{name}\0{len(data)}\0".encode())
        key.update(data)
    return key.hexdigest()


def zig_version() -> str:
    """The version of the installed `ziglang`. Raises ToolchainError where there is none."""
    try:
        return version("ziglang")
    except PackageNotFoundError:
        raise ToolchainError(
            f"ziglang, the C compiler that launchers are built with, is missing. {_INSTALL}"
        ) from None


def _flags(target_table: Mapping[str, Any]) -> tuple[str, ...]:
    own = ("-I.", "-Iinclude")
    if target_table["vendor"] != "cpu":
        return (*FLAGS, *own, "-O2")
    return (*FLAGS, *own, "-Icpu", *cpu.FLAGS[target_table["arch"]])


def _inputs(target_table: Mapping[str, Any], host: str) -> dict[str, bytes]:
    """Every file that is compiled or included, by its path inside the build folder."""
    if host not in HOSTS:
        raise BuildError(f"host: wanted one of {', '.join(HOSTS)}, found {host!r}")
    vendor = vendor_of(target_table)
    arch = target_table["arch"]
    if target_table["vendor"] == "cpu" and host.split("-")[0] != arch:
        raise BuildError(f"cpu:{arch}: wanted a host of that architecture, found {host}")
    files = {name: (_HERE / name).read_bytes() for name in (*HEADERS, *COMMON_SOURCES, *vendor.sources)}
    files["table.c"] = generate_table(target_table).encode()
    include = _package_folder("tvm_ffi") / "include"
    for name in FFI_HEADERS:
        try:
            files[f"include/{name}"] = (include / name).read_bytes()
        except OSError as error:
            raise ToolchainError(
                f"apache-tvm-ffi: wanted its C header {name}, found none ({error.strerror}). {_INSTALL}"
            ) from None
    if target_table["vendor"] == "cpu":
        files |= {f"cpu/{name}": (cpu.FOLDER / name).read_bytes() for name in (*cpu.SOURCES, *cpu.HEADERS)}
    return files


def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ToolchainError(f"the Python package {package} is missing. {_INSTALL}")
    return Path(next(iter(spec.submodule_search_locations)))


def _environment(folder: Path) -> dict[str, str]:
    """zig's own caches: shared between builds where a cache folder can be made, else in the build folder."""
    environment = dict(os.environ)
    try:
        shared = default_folder(environment) / "zig"
        shared.mkdir(parents=True, exist_ok=True)
    except (OSError, RequestError):
        shared = folder / "zig-global"
    environment["ZIG_GLOBAL_CACHE_DIR"] = str(shared.absolute())
    environment["ZIG_LOCAL_CACHE_DIR"] = str(folder / "zig-local")
    return environment
