"""Moore Threads: a `mubin` is a shared ELF object that MUSA's llc and lld write.

Its note's content is not public, so that where the parameters lie is derived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...kernels.gpgpu.route import KernelForm
from .. import codeobject, elf
from . import Parameter, Tool

ROUTE = "gpgpu"
ARCHS = ("mp_21", "mp_22", "mp_31")
CHIPS: Mapping[str, tuple[str, ...]] = {"mp_21": ("S80",), "mp_22": ("S4000",), "mp_31": ("S5000",)}
ALIASES = ("moore-threads", "musa", "mtt")
TOOLS = ("triton", "backend-mthreads", "musa-llc")
LOOKUP: Mapping[str, Tool] = {
    "backend-mthreads": Tool(
        ("{triton}/backends/mthreads/compiler.py", "{triton}/backends/musa/compiler.py"), ()
    ),
    "musa-llc": Tool(
        ("{triton}/backends/mthreads/bin/llc", "/usr/local/musa/bin/llc"), pattern=r"LLVM version (\d[\d.]*)"
    ),
}
SDK = "Moore Threads' MUSA toolkit and its Triton"
BINARY = "mubin"
SECTION_KEYS: Mapping[str, Callable[[Any], object]] = {}
# MUSA declares stream-ordered allocation, but releases up to 4.3 were found without a working free.
SCRATCH = False

# What MUSA's llc writes; the ELF registry gives the number to nobody here, and another vendor uses it too.
_EM_MTGPU = 253
_OWNERS = (b"MTGPU", b"GNU")
# From this capability on warps are of 32 threads, before of 128.
_NARROW_WARPS = 30
# Bytes of (static) shared memory, where the toolchain names a limit.
_SHARED = {"mp_22": 73728, "mp_31": 196608}


def _capability(arch: str) -> int:
    return int(arch.removeprefix("mp_"))


def needs(arch: str) -> tuple[str, ...]:
    return TOOLS


def triton_target(arch: str) -> tuple[str, int | str, int]:
    return ("musa", _capability(arch), warp_size(arch))


def warp_size(arch: str) -> int:
    return 32 if _capability(arch) >= _NARROW_WARPS else 128


def elf_machine(arch: str) -> int:
    return _EM_MTGPU


def device_code(binary: bytes, arch: str) -> bytes:
    strangers = codeobject.owners(binary) - set(_OWNERS)
    if strangers:
        found = ", ".join(sorted(owner.decode("ascii", "replace") for owner in strangers))
        raise ValueError(f"wanted a mubin, found an ELF file with notes of {found}")
    return binary


def forms(arch: str) -> tuple[str, ...]:
    return ("block",)


def shared_memory(arch: str) -> int:
    return _SHARED.get(arch, 48 << 10)


def options(form: KernelForm) -> Mapping[str, int | bool | str]:
    return {
        "num_warps": form.num_warps,
        "num_stages": form.num_stages,
        "num_ctas": form.num_ctas,
        "en_wmma": False,
        "enable_llc_opt": False,
        "enable_backend_opt": False,
        "enable_fp8_burst2": False,
        "enable_fp_fusion": False,
        "sanitize_overflow": False,
        "debug": False,
        "launch_cooperative_grid": False,
    }


def environment(arch: str) -> Mapping[str, str]:
    return {}


def numerics() -> Mapping[str, object]:
    return {"fp_fusion": False, "denormals": "as MUSA's llc sets them"}


def toolchain(arch: str, versions: Mapping[str, str]) -> Mapping[str, str]:
    found = {tool: versions[tool] for tool in TOOLS}
    return {**found, "evidence": "built by the vendor's own Triton; never loaded by this project"}


def min_driver(toolchain: Mapping[str, str]) -> int:
    return 0


def parameters(binary: bytes, entry: str) -> tuple[Parameter, ...] | None:
    if not elf.read(binary).has_symbol(entry):
        raise ValueError(f"the binary has no symbol {entry}")
    return None


def resources(binary: bytes, entry: str) -> Mapping[str, int]:
    raise ValueError("where these binaries say what a kernel uses is not public")
