"""T-Head's PPUs: an `hgbin` is an ELF file that ppu-llc writes, with a section .hg_info.<kernel> a kernel.

Neither its ELF machine nor the content of that section is public. The machine is taken from what was built,
and is none that the ELF registry gives to others; where the parameters lie is derived. A PPU calls itself an
NVIDIA device of capability 8.0 or 8.9, and runs no NVIDIA code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...kernels.gpgpu.route import KernelForm
from .. import elf
from . import Parameter, Tool

ROUTE = "gpgpu"
ARCHS = ("ppu001", "ppu0015")
CHIPS: Mapping[str, tuple[str, ...]] = {"ppu001": ("PPU-ZW810E",)}
ALIASES = ("t-head", "ppu", "alibaba")
TOOLS = ("triton", "backend-ppu", "ppu-llc")
LOOKUP: Mapping[str, Tool] = {
    "backend-ppu": Tool(("{triton}/backends/ppu/compiler.py",), ()),
    "ppu-llc": Tool(
        ("{triton}/backends/ppu/bin/ppu-llc", "$PPU_SDK/bin/ppu-llc", "/usr/local/PPU_SDK/bin/ppu-llc")
    ),
}
SDK = "T-Head's PPU SDK and its Triton"
BINARY = "hgbin"
SECTION_KEYS: Mapping[str, Callable[[Any], object]] = {}
SCRATCH = True

_CAPABILITY = {"ppu001": 80, "ppu0015": 89}


def needs(arch: str) -> tuple[str, ...]:
    return TOOLS


def triton_target(arch: str) -> tuple[str, int | str, int]:
    return ("cuda", _CAPABILITY[arch], warp_size(arch))


def warp_size(arch: str) -> int:
    return 32


def elf_machine(arch: str) -> int:
    return 0


def device_code(binary: bytes, arch: str) -> bytes:
    return binary


def forms(arch: str) -> tuple[str, ...]:
    return ("block",)


def shared_memory(arch: str) -> int:
    # What a kernel may have without asking for more.
    return 48 << 10


def options(form: KernelForm) -> Mapping[str, int | bool | str]:
    return {
        "num_warps": form.num_warps,
        "num_stages": form.num_stages,
        "num_ctas": form.num_ctas,
        "enable_fp_fusion": False,
        "enable_reflect_ftz": False,
        "sanitize_overflow": False,
        "debug": False,
        "launch_pdl": False,
        "launch_cooperative_grid": False,
    }


def environment(arch: str) -> Mapping[str, str]:
    return {}


def numerics() -> Mapping[str, object]:
    return {"fp_fusion": False, "denormals": "as ppu-llc sets them"}


def toolchain(arch: str, versions: Mapping[str, str]) -> Mapping[str, str]:
    found = {tool: versions[tool] for tool in TOOLS}
    return {**found, "evidence": "built by the vendor's own Triton; never loaded by this project"}


def min_driver(toolchain: Mapping[str, str]) -> int:
    return 0


def parameters(binary: bytes, entry: str) -> tuple[Parameter, ...] | None:
    elf.read(binary).section(f".hg_info.{entry}")
    return None


def resources(binary: bytes, entry: str) -> Mapping[str, int]:
    raise ValueError("where these binaries say what a kernel uses is not public")
