"""TianShu (Iluvatar CoreX): what its Triton calls a `cubin` is CoreX's own ELF file, not NVIDIA's.

Neither its ELF machine nor the layout of its sections is public. The machine is taken from what was built,
and is none that the ELF registry gives to others; where the parameters lie is derived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...kernels.gpgpu.route import KernelForm
from .. import elf
from . import Parameter, Tool

ROUTE = "gpgpu"
ARCHS = ("ivcore10", "ivcore11", "ivcore20")
CHIPS: Mapping[str, tuple[str, ...]] = {"ivcore11": ("BI-V150", "MR-V100")}
ALIASES = ("iluvatar", "corex")
TOOLS = ("triton", "backend-iluvatar", "corex")
LOOKUP: Mapping[str, Tool] = {
    "backend-iluvatar": Tool(
        ("{triton}/backends/iluvatar/compiler.py", "{triton}/backends/corex/compiler.py"), ()
    ),
    "corex": Tool(("/usr/local/corex/nvvm/libdevice/libdevice.compute_bi.10.bc",), ()),
}
SDK = "Iluvatar's CoreX and its Triton"
BINARY = "cubin"
SECTION_KEYS: Mapping[str, Callable[[Any], object]] = {}
SCRATCH = False

_CAPABILITY = {"ivcore10": 70, "ivcore11": 71, "ivcore20": 80}


def needs(arch: str) -> tuple[str, ...]:
    return TOOLS


def triton_target(arch: str) -> tuple[str, int | str, int]:
    return ("cuda", _CAPABILITY[arch], warp_size(arch))


def warp_size(arch: str) -> int:
    return 64


def elf_machine(arch: str) -> int:
    return 0


def device_code(binary: bytes, arch: str) -> bytes:
    return binary


def forms(arch: str) -> tuple[str, ...]:
    return ("block",)


def shared_memory(arch: str) -> int:
    # What a kernel may have on any chip with CUDA's interface without asking for more.
    return 48 << 10


def options(form: KernelForm) -> Mapping[str, int | bool | str]:
    return {
        "num_warps": form.num_warps,
        "num_stages": form.num_stages,
        "num_ctas": form.num_ctas,
        "use_sme": 0,
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
    return {"fp_fusion": False, "denormals": "as CoreX sets them"}


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
