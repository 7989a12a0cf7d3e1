"""Samples of the bundle format, and small C stand-ins for a launcher and for a driver."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvbuild.aot.bundle import write
from kvbuild.runtime import direct
from kvbuild.runtime.launchtable import Kernel, Variant, launch_table_digest
from kvbuild.runtime.manifest import Manifest
from kvbuild.runtime.strictjson import Node
from kvbuild.runtime.torch_place import Place

HOST = f"{platform.machine()}-linux-gnu.2.17"

LAUNCHER = r"""
#include <string.h>
#include <tvm/ffi/c_api.h>
#define EXPORT __attribute__((visibility("default")))
static int64_t calls, opens[16];
static int fail(const char *kind, const char *text) { TVMFFIErrorSetRaisedFromCStr(kind, text); return -1; }

EXPORT int __tvm_ffi_open(void *self, const TVMFFIAny *args, int32_t n, TVMFFIAny *result) {
  if (n != 3 || args[2].type_index != kTVMFFIMap) return fail("TypeError", "open: wrong arguments");
  int64_t device = args[0].v_int64;
  if (device == 9) return fail("RuntimeError", "DeviceError: CUDA_ERROR_NO_DEVICE: nothing there");
  if (device == 8) return fail("ValueError", "manifest: wanted another launch table");
  ++opens[device];
  return 0;
}
EXPORT int __tvm_ffi_compress(void *self, const TVMFFIAny *args, int32_t n, TVMFFIAny *result) {
  if (n != 12) return fail("TypeError", "compress: wanted 12 arguments");
  for (int i = 0; i < 9; ++i)
    if (args[i].type_index != kTVMFFITensor) return fail("TypeError", "an operand is no tensor");
  if (args[9].type_index != kTVMFFIInt) return fail("TypeError", "block_size is no int");
  if (args[9].v_int64 == -1) return fail("RuntimeError", "DeviceError: CUDA_ERROR_LAUNCH_FAILED: words");
  if (args[9].v_int64 == -2) return fail("ValueError", "block_size: wanted 8, found -2");
  if (args[9].v_int64 == -3) return fail("RuntimeError", "something else");
  if (args[11].type_index != kTVMFFIFloat || args[11].v_float64 != 1.0e-6) return fail("ValueError", "eps");
  const DLTensor *cache = (const DLTensor *)((const char *)args[8].v_ptr + sizeof(TVMFFIObject));
  ((uint8_t *)cache->data)[0] = MARK;
  ++calls;
  return 0;
}
EXPORT int __tvm_ffi_close(void *self, const TVMFFIAny *args, int32_t n, TVMFFIAny *result) {
  if (--opens[args[0].v_int64] < 0) return fail("RuntimeError", "DeviceError: closed more often than opened");
  return 0;
}
EXPORT int __tvm_ffi_counters(void *self, const TVMFFIAny *args, int32_t n, TVMFFIAny *result) {
  int64_t values[4] = {calls, opens[args[0].v_int64], 5, 6};
  TVMFFIByteArray bytes = {(const char *)values, NUM_COUNTERS * sizeof(int64_t)};
  return TVMFFIBytesFromByteArray(&bytes, result);
}
"""

DRIVER = r"""
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
static int number(const char *name) { const char *text = getenv(name); return text ? atoi(text) : 0; }
int cuInit(unsigned flags) { return number("STAND_IN_INIT"); }
int cuDriverGetVersion(int *out) { *out = 12040; return 0; }
int cuDeviceGetCount(int *out) { *out = number("STAND_IN_COUNT"); return 0; }
int cuDeviceGet(int *out, int index) { *out = index + 100; return 0; }
int cuCtxGetDevice(int *out) { *out = number("STAND_IN_CURRENT"); return *out < 0 ? 201 : 0; }
int cuDeviceGetName(char *out, int size, int device) {
  const char *name = getenv("STAND_IN_NAME");
  name ? snprintf(out, size, "%s", name) : snprintf(out, size, "NVIDIA Stand-in %d", device);
  return 0;
}
int cuDeviceGetAttribute(int *out, int which, int device) {
  if (device < 100) return 101;
  const char *capability = getenv("STAND_IN_CAPABILITY");
  int major = 8, minor = device - 100 + 6;
  if (capability) sscanf(capability, "%d.%d", &major, &minor);
  /* On the PCI bus: domain 1, bus 0xca, device 0. */
  switch (which) {
    case 75: *out = major; break;
    case 76: *out = minor; break;
    case 33: *out = 0xca; break;
    case 34: *out = 0; break;
    case 50: *out = 1; break;
    default: *out = -1;
  }
  return 0;
}
int cuGetErrorName(int code, const char **out) { *out = "CUDA_ERROR_UNKNOWN"; return 0; }
int cuGetErrorString(int code, const char **out) { *out = "unknown error"; return 0; }
"""


RUNTIME = r"""
#include <stdio.h>
#include <stdlib.h>
static int number(const char *name) { const char *text = getenv(name); return text ? atoi(text) : 0; }
int mcInit(unsigned flags) { return number("STAND_IN_INIT"); }
int mcDriverGetVersion(int *out) { *out = 3; return 0; }
int mcGetDeviceCount(int *out) { *out = number("STAND_IN_COUNT"); return 0; }
int mcGetDevice(int *out) { *out = number("STAND_IN_CURRENT"); return 0; }
int mcDeviceGetName(char *out, int size, int device) {
  snprintf(out, size, "%s", getenv("STAND_IN_NAME"));
  return 0;
}
const char *mcGetErrorName(int code) { return "mcErrorUnknown"; }
const char *mcGetErrorString(int code) { return "unknown error"; }
"""

CHIP = 'const char *aclrtGetSocName(void) { return "Ascend910B2"; }'


def compile_c(folder: Path, name: str, source: str, *flags: str) -> bytes:
    """The shared object of one C source; compiled once a session and kept in `folder`."""
    result = folder / f"{name}.so"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            (folder / f"{name}.c").write_text(source)
            spec = importlib.util.find_spec("tvm_ffi")
            assert spec is not None and spec.origin is not None
            include = Path(spec.origin).parent / "include"
            command = [sys.executable, "-m", "ziglang", "cc", "-target", HOST, "-shared", "-fPIC", "-O1"]
            command += ["-isystem", str(include), "-Wl,-z,undefs"]
            command += [*flags, f"{name}.c", "-o", f"{name}.tmp"]
            environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(folder / "zig")}
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            (folder / f"{name}.tmp").rename(result)
    return result.read_bytes()


class Samples:
    """Manifests and bundles for tests. JSON values are fresh copies: change them at will."""

    host = HOST
    machine = platform.machine()

    def kernel(self, blob: str, **changes: Any) -> dict[str, Any]:
        tile = {"block_t": 4, "block_d": 512, "split": 1, "num_warps": 4, "num_stages": 3, "cluster": False}
        plain = {
            "name": "fused-c128-general",
            "entry": "compress_fused",
            "ratio": 128,
            "layout": "general",
            "tile": tile,
            "blob": blob,
            "num_warps": 4,
            "cluster": 1,
            "shared": 1024,
            "args": [
                {"field": "state_cache", "type": "*fp32", "offset": 0, "size": 8},
                {"field": "weight_is_fp32", "type": "i32", "offset": 8, "size": 4},
            ],
            "hidden": 2,
            "global_scratch": 0,
            "profile_scratch": 0,
            "constexprs": {"RATIO": 128, "FLAG": True, "NAME": "x"},
            "assumes": {"block_size": 0, "alignment": 0},
            "grid": {"per_output": 1, "y": 1},
        }
        return {**plain, **changes}

    def variant(self, **changes: Any) -> dict[str, Any]:
        plain = {
            "ratio": 128,
            "layout": "general",
            "max_outputs": None,
            "kernels": ["fused-c128-general"],
            "scratch_per_output": 0,
        }
        return {**plain, **changes}

    def target(self, vendor: str, arch: str, launcher: str, blob: str = "", **changes: Any) -> dict[str, Any]:
        gpu = vendor != "cpu"
        value = {
            "vendor": vendor,
            "arch": arch,
            "route": "gpgpu" if gpu else "cpu",
            "warp_size": 32 if gpu else 0,
            "elf_machine": 190 if gpu else 62,
            "min_driver": 0,
            "toolchain": {"zig": "0.17.1"},
            "numerics": {"fp_fusion": False, "denormals": "preserve"},
            "source_digest": "0" * 64,
            "launchers": {HOST: launcher},
            "launch_table": "",
            "kernels": [self.kernel(blob)] if gpu else [],
            "variants": [self.variant()] if gpu else [],
            **changes,
        }
        return self.sealed(value)

    def sealed(self, target: dict[str, Any]) -> dict[str, Any]:
        """The target with the digest its launch table has."""
        kernels = tuple(Kernel.read(Node(copy.deepcopy(value), "")) for value in target["kernels"])
        variants = tuple(Variant.read(Node(copy.deepcopy(value), "")) for value in target["variants"])
        return {**target, "launch_table": launch_table_digest(kernels, variants)}

    def manifest(self, targets: list[dict[str, Any]], blobs: Mapping[str, bytes]) -> dict[str, Any]:
        return {
            "schema": 1,
            "kvbuild": "0.1.0",
            "operator": "c128_256_512_compress",
            "targets": sorted(copy.deepcopy(targets), key=lambda t: (t["vendor"], t["arch"])),
            "blobs": {name: len(content) for name, content in blobs.items()},
        }

    def blobs(self, *contents: bytes) -> dict[str, bytes]:
        return {hashlib.sha256(content).hexdigest(): content for content in contents}

    def mixed(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """A manifest with a cpu and an NVIDIA target, and its blobs, which are not real."""
        blobs = self.blobs(b"launcher of the cpu", b"launcher for sm_90", b"a device binary")
        cpu, gpu, binary = blobs
        targets = [self.target("cpu", "x86_64", cpu), self.target("nvidia", "sm_90", gpu, binary)]
        return self.manifest(targets, blobs), blobs

    def write(self, path: Path, manifest: dict[str, Any], blobs: Mapping[str, bytes]) -> Path:
        write(path, Manifest.from_json(manifest), blobs)
        return path


@pytest.fixture(scope="session")
def samples() -> Samples:
    return Samples()


@pytest.fixture(scope="session")
def stand_in_launcher(session_folder: Path) -> Callable[..., bytes]:
    """Compiles a launcher that writes `mark` into kv_cache's first byte and has `counters` counters."""

    def build(mark: int = 42, counters: int = 2) -> bytes:
        name = f"launcher-{mark}-{counters}"
        return compile_c(session_folder, name, LAUNCHER, f"-DMARK={mark}", f"-DNUM_COUNTERS={counters}")

    return build


@pytest.fixture
def stand_in_bundle(samples: Samples, stand_in_launcher: Callable[..., bytes], tmp_path: Path) -> Path:
    """A bundle whose one target is this machine's cpu, served by the stand-in launcher."""
    blobs = samples.blobs(stand_in_launcher())
    target = samples.target("cpu", samples.machine, next(iter(blobs)))
    return samples.write(tmp_path / "stand-in.kvb", samples.manifest([target], blobs), blobs)


@pytest.fixture(scope="session")
def stand_in_driver(session_folder: Path) -> Path:
    """A library with the few calls of libcuda that detection makes; STAND_IN_* variables steer it."""
    compile_c(session_folder, "libcuda-stand-in", DRIVER)
    return session_folder / "libcuda-stand-in.so"


@pytest.fixture(scope="session")
def stand_in_for(session_folder: Path) -> Callable[[str], Path]:
    """The same with another vendor's prefix: hg, mu, or mc and aclrt, which have functions of their own."""

    def build(prefix: str) -> Path:
        own = {"mc": RUNTIME, "aclrt": CHIP}
        source = own.get(prefix) or re.sub(r"\bcu(?=[A-Z])", prefix, DRIVER)
        compile_c(session_folder, f"lib{prefix}-stand-in", source)
        return session_folder / f"lib{prefix}-stand-in.so"

    return build


@pytest.fixture(scope="module", params=["in place", "exchange API", "plain"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How a launcher gets at the tensors of calls, for operators that are loaded, and steps that are bound,
    while it lasts: read in place, by torch's DLPack exchange API, or converted by TVM-FFI."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "exchange API":
            patch.setattr(direct, "_place", lambda on_cpu: Place())
        if request.param == "plain":
            patch.setattr(direct, "exchange_api", lambda: None)
        yield request.param
