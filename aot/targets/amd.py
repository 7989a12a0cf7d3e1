"""AMD: code objects (hsaco) by Triton and the LLVM in its wheel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...kernels.gpgpu.route import KernelForm
from .. import codeobject
from . import Parameter, Tool

ROUTE = "gpgpu"
ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
CHIPS: Mapping[str, tuple[str, ...]] = {
    "gfx90a": ("MI250", "MI250X", "MI210"),
    "gfx942": ("MI300X", "MI300A", "MI325X"),
    "gfx950": ("MI355X", "MI350X"),
    "gfx1100": ("RX 7900 XTX", "RX 7900 XT"),
    "gfx1201": ("RX 9070 XT", "RX 9070"),
}
ALIASES = ("rocm", "hip")
TOOLS = ("triton",)
LOOKUP: Mapping[str, Tool] = {}
SDK = ""
BINARY = "hsaco"
SECTION_KEYS: Mapping[str, Callable[[Any], object]] = {}
SCRATCH = True

_EM_AMDGPU = 224
# Bytes of shared memory a block, where it is not 64 KiB.
_LDS = {"gfx950": 160 << 10}


def needs(arch: str) -> tuple[str, ...]:
    return TOOLS


def triton_target(arch: str) -> tuple[str, int | str, int]:
    return ("hip", arch, warp_size(arch))


def warp_size(arch: str) -> int:
    return 64 if arch.startswith("gfx9") else 32


def elf_machine(arch: str) -> int:
    return _EM_AMDGPU


def device_code(binary: bytes, arch: str) -> bytes:
    return binary


def forms(arch: str) -> tuple[str, ...]:
    return ("block",)


def shared_memory(arch: str) -> int:
    return _LDS.get(arch, 64 << 10)


def options(form: KernelForm) -> Mapping[str, int | bool]:
    return {
        "num_warps": form.num_warps,
        "num_stages": form.num_stages,
        "num_ctas": form.num_ctas,
        "waves_per_eu": 0,
        "enable_fp_fusion": False,
        "allow_flush_denorm": False,
        "sanitize_overflow": False,
        "debug": False,
        "launch_cooperative_grid": False,
    }


def environment(arch: str) -> Mapping[str, str]:
    return {}


def numerics() -> Mapping[str, object]:
    return {"fp_fusion": False, "denormals": "preserve"}


def toolchain(arch: str, versions: Mapping[str, str]) -> Mapping[str, str]:
    return {"triton": versions["triton"]}


def min_driver(toolchain: Mapping[str, str]) -> int:
    return 0


def parameters(binary: bytes, entry: str) -> tuple[Parameter, ...]:
    arguments = codeobject.member(codeobject.AMDGPU.kernel(binary, entry), ".args", list)
    return tuple(Parameter(*codeobject.AMDGPU.place(argument)) for argument in arguments)


def resources(binary: bytes, entry: str) -> Mapping[str, int]:
    kernel = codeobject.AMDGPU.kernel(binary, entry)
    names = {"registers": ".vgpr_count", "spill_bytes": ".private_segment_fixed_size"}
    return {name: codeobject.member(kernel, member, int) for name, member in names.items()}
