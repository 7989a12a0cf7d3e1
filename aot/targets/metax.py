"""MetaX: MACA's Triton writes an `mcfatbin`, an offload bundle of bitcode and native code.

What ships is the native member alone, which mcModuleLoadData takes as well: nothing is left for the driver to
compile. It is an ELF file whose note describes its kernels as AMD's does, under MetaX's own names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...kernels.gpgpu.route import KernelForm
from .. import codeobject, offload
from . import Parameter, Tool

ROUTE = "gpgpu"
ARCHS = ("c500", "c600")
CHIPS: Mapping[str, tuple[str, ...]] = {"c500": ("C500", "C550"), "c600": ("C600",)}
ALIASES = ("maca",)
TOOLS = ("triton", "backend-metax", "mxcc")
LOOKUP: Mapping[str, Tool] = {
    "backend-metax": Tool(("{triton}/backends/metax/compiler.py", "{triton}/backends/maca/compiler.py"), ()),
    "mxcc": Tool(("$MACA_PATH/mxgpu_llvm/bin/mxcc", "/opt/maca/mxgpu_llvm/bin/mxcc")),
}
SDK = "MetaX's MACA SDK and its Triton"
BINARY = "mcfatbin"
SECTION_KEYS: Mapping[str, Callable[[Any], object]] = {}
SCRATCH = True

# What mxcc writes; the ELF registry gives the number to nobody here, and another vendor uses it too.
_EM_MXC = 253
_NOTES = codeobject.Notes(b"MetaX", 0x30, "macahca.kernels", ".arg_offset_bytes", ".arg_size_bytes")
# MACA's Triton counts chips as if they were NVIDIA's capabilities: the device's major 10 is 80, 15 is 86. (It
# has 89 for a major 16, of which no chip is known by name.)
_CAPABILITY = {"c500": 80, "c600": 86}
_MEMBER = {"c500": "maca-mxc-metax-macahca--xcore10", "c600": "maca-mxc-metax-macahca--xcore15"}


def needs(arch: str) -> tuple[str, ...]:
    return TOOLS


def triton_target(arch: str) -> tuple[str, int | str, int]:
    return ("maca", _CAPABILITY[arch], warp_size(arch))


def warp_size(arch: str) -> int:
    return 64


def elf_machine(arch: str) -> int:
    return _EM_MXC


def device_code(binary: bytes, arch: str) -> bytes:
    found = offload.members(binary)
    native = [name for name in found if name.startswith(_MEMBER[arch]) and not name.endswith("-bc")]
    if len(native) != 1:
        raise ValueError(
            f"wanted one member {_MEMBER[arch]}.. in the mcfatbin, found {len(native)} among "
            f"{', '.join(sorted(found)) or 'none'}"
        )
    return bytes(found[native[0]])


def forms(arch: str) -> tuple[str, ...]:
    return ("block",)


def shared_memory(arch: str) -> int:
    return 64 << 10


def options(form: KernelForm) -> Mapping[str, int | bool | str]:
    return {
        "num_warps": form.num_warps,
        "num_stages": form.num_stages,
        "num_ctas": form.num_ctas,
        "pipeline": "basic",
        "scenario": "",
        "pipeline_load_num": -1,
        "enable_fp_fusion": False,
        "sanitize_overflow": False,
        "debug": False,
        "launch_cooperative_grid": False,
    }


def environment(arch: str) -> Mapping[str, str]:
    return {}


def numerics() -> Mapping[str, object]:
    return {"fp_fusion": False, "denormals": "as mxcc sets them"}


def toolchain(arch: str, versions: Mapping[str, str]) -> Mapping[str, str]:
    found = {tool: versions[tool] for tool in TOOLS}
    return {**found, "evidence": "built by the vendor's own Triton; never loaded by this project"}


def min_driver(toolchain: Mapping[str, str]) -> int:
    return 0


def parameters(binary: bytes, entry: str) -> tuple[Parameter, ...]:
    arguments = codeobject.member(_NOTES.kernel(binary, entry), ".args", list)
    # Hidden ones of this kind are the runtime's to fill in; Triton's own pointers look like any other.
    passed = [a for a in arguments if not codeobject.member(a, ".arg_param_pass", str).startswith("hidden_")]
    return tuple(Parameter(*_NOTES.place(argument)) for argument in passed)


def resources(binary: bytes, entry: str) -> Mapping[str, int]:
    raise ValueError("where these binaries say what a kernel uses is not public")
