"""Builds launchers and stand-in drivers for tests, and runs scenarios against them in a subprocess."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm_ffi.libinfo

from kvbuild.aot.launcher import build_launcher, launch_table_digest
from kvbuild.kernels.gpgpu.route import ARGS

HERE = Path(__file__).parent
SIZES = {"i64": 8, "i32": 4, "fp32": 4}
MACHINES = {"nvidia": 190, "amd": 224}
SONAMES = {"nvidia": ("cuda.c", "libcuda.so.1"), "amd": ("hip.c", "libamdhip64.so")}


def host_triple() -> str:
    machine = os.uname().machine
    return f"{'aarch64' if machine == 'arm64' else machine}-linux-gnu.2.17"


def image(machine: int, tag: int) -> bytes:
    """What a device binary looks like from outside: an ELF header and a byte that tells images apart."""
    return b"\x7fELF\x02\x01\x01".ljust(18, b"\0") + machine.to_bytes(2, "little") + bytes(43) + bytes([tag])


def kernel(name: str, layout: str, blob: bytes, ratio: int = 128, **changes: Any) -> dict[str, Any]:
    aligned = layout == "aligned"
    args = []
    offset = 0
    for arg in ARGS:
        size = 8 if arg.type.startswith("*") else SIZES[arg.type]
        offset = -(-offset // size) * size
        args.append({"field": arg.field, "type": arg.type, "offset": offset, "size": size})
        offset += size
    return {
        "name": name, "entry": f"entry_{name.replace('-', '_')}", "ratio": ratio, "layout": layout,
        "tile": {"block_t": 4, "block_d": 512, "split": 1, "num_warps": 4, "num_stages": 1, "cluster": False},
        "blob": hashlib.sha256(blob).hexdigest(), "num_warps": 4, "cluster": 1, "shared": 1024, "args": args,
        "hidden": 2, "global_scratch": 0, "profile_scratch": 0, "constexprs": {"RATIO": ratio},
        "assumes": {"block_size": 8 if aligned else 0, "alignment": 16 if aligned else 0},
        "grid": {"per_output": 1, "y": 1},
    } | changes  # fmt: skip


def variant(
    layout: str, max_outputs: int | None, *names: str, ratio: int = 128, scratch: int = 0
) -> dict[str, Any]:
    return {
        "ratio": ratio, "layout": layout, "max_outputs": max_outputs, "kernels": list(names),
        "scratch_per_output": scratch,
    }  # fmt: skip


def gpu_target(vendor: str = "nvidia") -> tuple[dict[str, Any], dict[str, bytes]]:
    """A target with every kind of variant, and its blobs by sha256.

    Variants in order: ratio 128 aligned up to 4, aligned any (a cluster on NVIDIA), general any; ratio 512
    aligned up to 8 (two launches with scratch), general any.
    """
    images = [image(MACHINES[vendor], tag) for tag in range(3)]
    cluster = 16 if vendor == "nvidia" else 1
    kernels = [
        kernel("small", "aligned", images[0], shared=0),
        kernel("large", "aligned", images[0], cluster=cluster, num_warps=2, shared=100_000),
        kernel("general", "general", images[1], hidden=1),
        kernel("scan", "aligned", images[1], ratio=512, grid={"per_output": 8, "y": 3}, num_warps=1),
        kernel("finish", "aligned", images[1], ratio=512),
        kernel("general512", "general", images[2], ratio=512, cluster=min(cluster, 4)),
    ]
    variants = [
        variant("aligned", 4, "small"),
        variant("aligned", None, "large"),
        variant("general", None, "general"),
        variant("aligned", 8, "scan", "finish", ratio=512, scratch=2048),
        variant("general", None, "general512", ratio=512),
    ]
    arch = {"nvidia": "sm_90", "amd": "gfx942"}[vendor]
    target = {
        "vendor": vendor, "arch": arch, "route": "gpgpu", "warp_size": 32 if vendor == "nvidia" else 64,
        "elf_machine": MACHINES[vendor], "min_driver": 12080 if vendor == "nvidia" else 0, "toolchain": {},
        "numerics": {}, "source_digest": "0" * 64, "launch_table": launch_table_digest(kernels, variants),
        "kernels": kernels, "variants": variants,
    }  # fmt: skip
    return target, {hashlib.sha256(data).hexdigest(): data for data in images}


def cpu_target(arch: str) -> dict[str, Any]:
    return {
        "vendor": "cpu", "arch": arch, "route": "cpu", "warp_size": 0, "elf_machine": 62, "min_driver": 0,
        "toolchain": {}, "numerics": {}, "source_digest": "0" * 64,
        "launch_table": launch_table_digest([], []), "kernels": [], "variants": [],
    }  # fmt: skip


def manifest_of(target: Mapping[str, Any]) -> bytes:
    return json.dumps({"targets": [target]}, sort_keys=True, separators=(",", ":")).encode()


def build_standin(vendor: str, folder: Path, cache: Path, *defines: str) -> Path:
    """Compiles a stand-in driver into `folder` under the name that launchers look for; returns the folder."""
    source, soname = SONAMES[vendor]
    build_shared(source, folder, soname, cache, *defines)
    return folder


def build_shared(source: str, folder: Path, name: str, cache: Path, *flags: str) -> None:
    """Compiles one C source of this folder into the shared object `name` of another."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "ziglang",
        "cc",
        "-target",
        host_triple(),
        "-O1",
        "-shared",
        "-fPIC",
        "-s",
    ]
    command += ["-Wall", "-Werror", "-fvisibility=hidden", "-fno-sanitize=undefined"]
    command += [f"-Wl,-soname,{name}", *flags]
    command += [str(HERE / source), "-o", str(folder / name)]
    zig = {"ZIG_GLOBAL_CACHE_DIR": str(cache / "zig"), "ZIG_LOCAL_CACHE_DIR": str(folder / "zig-local")}
    subprocess.run(command, check=True, env={**os.environ, **zig})


def build_callers(folder: Path) -> Path:
    """What callers.py needs: a launcher, a driver that counts its calls, and torch's tensors relabelled."""
    target, blobs = gpu_target("nvidia")
    Bench.build(target, blobs, folder)
    build_standin("nvidia", folder / "driver", folder / "cache", "-DCOUNTING")
    include = tvm_ffi.libinfo.find_dlpack_include_path()
    build_shared("relabel.c", folder, "relabel.so", folder / "cache", "-isystem", include)
    description = {"target": target, "blobs": {name: data.hex() for name, data in blobs.items()}}
    (folder / "target.json").write_text(json.dumps(description))
    return folder


@dataclass(frozen=True)
class Bench:
    """A built launcher, and what a scenario needs to open it."""

    launcher: Path
    target: Mapping[str, Any]
    blobs: Mapping[str, bytes]

    @classmethod
    def build(cls, target: Mapping[str, Any], blobs: Mapping[str, bytes], folder: Path) -> Bench:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "launcher.so"
        path.write_bytes(build_launcher(target, host_triple()))
        return cls(path, target, blobs)

    def run(
        self, scenario: str, folder: Path, standin: Path | None = None, **settings: str
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Runs Python text that uses client.py; returns what it said and what the driver was asked."""
        log = folder / "calls.jsonl"
        log.unlink(missing_ok=True)
        sizes = (
            [str(arg["size"]) for arg in self.target["kernels"][0]["args"]] if self.target["kernels"] else []
        )
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("KVB_")},
            "PYTHONPATH": str(HERE), "LD_LIBRARY_PATH": str(standin) if standin else "",
            "KVB_STANDIN_LOG": str(log), "KVB_STANDIN_ARGS": ",".join([*sizes, "8"]),
            "KVB_TEST_LAUNCHER": str(self.launcher), "KVB_TEST_MANIFEST": manifest_of(self.target).decode(),
            "KVB_TEST_BLOBS": json.dumps({name: data.hex() for name, data in self.blobs.items()}),
            **settings,
        }  # fmt: skip
        text = "from client import *\nkvb = Launcher()\n" + textwrap.dedent(scenario)
        done = subprocess.run(
            [sys.executable, "-c", text],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return json.loads(done.stdout), calls


@functools.cache
def gpu_bench(vendor: str, root: Path) -> tuple[Bench, Path]:
    """The launcher of gpu_target(vendor) and the folder of its stand-in driver; built once a process."""
    folder = root / f"launcher-{vendor}-{os.getpid()}"
    target, blobs = gpu_target(vendor)
    return Bench.build(target, blobs, folder), build_standin(vendor, folder / "driver", root / "cache")


def launches(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The launches among the calls that a driver recorded."""
    return [call for call in calls if call["call"] == "launch"]


def names(calls: list[dict[str, Any]], *wanted: str) -> list[str]:
    """Which of the wanted functions were called, in order."""
    return [call["call"] for call in calls if call["call"] in wanted]
