"""Hygon's DCUs: code objects as AMD's, loaded by DTK's HIP. The same interface as AMD's, another vendor.

gfx906 (Z100) is a chip that AMD made too, and Triton's AMD backend builds for it by name; whether DTK loads
the result nobody here has tried. The other archs exist in DTK's own LLVM only, which Hygon's Triton calls as
a clang; it gives that clang flags of its own, an approximation of functions among them, which no option
turns off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...kernels.gpgpu.route import KernelForm
from .. import codeobject
from . import Parameter, Tool

ROUTE = "gpgpu"
ARCHS = ("gfx906", "gfx926", "gfx928", "gfx936", "gfx938")
CHIPS: Mapping[str, tuple[str, ...]] = {
    "gfx906": ("Z100",), "gfx926": ("K100",), "gfx928": ("K100_AI",), "gfx936": ("BW1000",),
}  # fmt: skip
ALIASES = ("dcu", "dtk")
TOOLS = ("triton", "backend-hcu", "dtk-clang")
LOOKUP: Mapping[str, Tool] = {
    "backend-hcu": Tool(("{triton}/backends/hcu/compiler.py",), ()),
    "dtk-clang": Tool(("$ROCM_PATH/aillvm/bin/clang-18", "/opt/dtk/aillvm/bin/clang-18")),
}
SDK = "Hygon's DTK and its Triton"
BINARY = "hsaco"
SECTION_KEYS: Mapping[str, Callable[[Any], object]] = {}
SCRATCH = True

_EM_AMDGPU = 224
_BY_NAME = ("gfx906",)


def needs(arch: str) -> tuple[str, ...]:
    return ("triton",) if arch in _BY_NAME else TOOLS


def triton_target(arch: str) -> tuple[str, int | str, int]:
    return ("hip", arch, warp_size(arch))


def warp_size(arch: str) -> int:
    return 64


def elf_machine(arch: str) -> int:
    return _EM_AMDGPU


def device_code(binary: bytes, arch: str) -> bytes:
    return binary


def forms(arch: str) -> tuple[str, ...]:
    return ("block",)


def shared_memory(arch: str) -> int:
    return 64 << 10


def options(form: KernelForm) -> Mapping[str, int | bool | str]:
    return {
        "num_warps": form.num_warps,
        "num_stages": form.num_stages,
        "num_ctas": form.num_ctas,
        "waves_per_eu": 1,
        "schedule_hint": "none",
        "sched_latency": "none",
        "mmac_layout_force": -1,
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
    found = {tool: versions[tool] for tool in needs(arch)}
    if arch in _BY_NAME:
        return {**found, "evidence": "built by name with Triton's AMD backend; not loaded on DTK"}
    return {**found, "evidence": "built by the vendor's own Triton; never loaded by this project"}


def min_driver(toolchain: Mapping[str, str]) -> int:
    return 0


def parameters(binary: bytes, entry: str) -> tuple[Parameter, ...]:
    arguments = codeobject.member(codeobject.AMDGPU.kernel(binary, entry), ".args", list)
    return tuple(Parameter(*codeobject.AMDGPU.place(argument)) for argument in arguments)


def resources(binary: bytes, entry: str) -> Mapping[str, int]:
    kernel = codeobject.AMDGPU.kernel(binary, entry)
    names = {"registers": ".vgpr_count", "spill_bytes": ".private_segment_fixed_size"}
    return {name: codeobject.member(kernel, member, int) for name, member in names.items()}
