"""NVIDIA: cubins by Triton and ptxas."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from ...kernels.gpgpu.route import KernelForm
from .. import elf
from . import Parameter, Tool

ROUTE = "gpgpu"
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
CHIPS: Mapping[str, tuple[str, ...]] = {
    "sm_80": ("A100", "A800", "A30"),
    "sm_86": ("A10", "A40", "RTX 3090"),
    "sm_89": ("L4", "L40S", "L40", "L20", "RTX 4090"),
    "sm_90": ("H100", "H200", "H800", "H20", "GH200"),
    "sm_100": ("B200", "GB200"),
    "sm_103": ("B300", "GB300"),
    "sm_120": ("RTX 5090",),
    "sm_121": ("GB10",),
}
ALIASES = ("cuda",)
TOOLS = ("triton", "ptxas")
# ptxas prints its release as well, which says less.
LOOKUP: Mapping[str, Tool] = {
    name: Tool((f"{{triton}}/backends/nvidia/bin/{name}",), pattern=r"\bV(\d+(?:\.\d+)+)")
    for name in ("ptxas", "ptxas-blackwell")
}
SDK = ""
BINARY = "cubin"
SECTION_KEYS: Mapping[str, Callable[[Any], object]] = {}
SCRATCH = True

_EM_CUDA = 190
_SHARED_KIB = {
    "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_120": 99,
    "sm_121": 99,
}  # fmt: skip
_HAS_CLUSTERS = 90
# Triton assembles this capability and those above with its second ptxas, of a newer CUDA major.
_SECOND_PTXAS_FROM = 90
# The first ptxas knows sm_90 too, and what it writes loads on drivers of its own, older major.
_FIRST_PTXAS_UP_TO = 90


def _capability(arch: str) -> int:
    return int(arch.removeprefix("sm_"))


def needs(arch: str) -> tuple[str, ...]:
    return TOOLS


def triton_target(arch: str) -> tuple[str, int | str, int]:
    return ("cuda", _capability(arch), warp_size(arch))


def warp_size(arch: str) -> int:
    return 32


def elf_machine(arch: str) -> int:
    return _EM_CUDA


def device_code(binary: bytes, arch: str) -> bytes:
    return binary


def forms(arch: str) -> tuple[str, ...]:
    return ("block", "stream", "cluster") if _capability(arch) >= _HAS_CLUSTERS else ("block", "stream")


def shared_memory(arch: str) -> int:
    # What a block may opt in to: the multiprocessor's, less the 1 KiB that each block costs.
    return _SHARED_KIB[arch] << 10


def options(form: KernelForm) -> Mapping[str, int | bool]:
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
    if _SECOND_PTXAS_FROM <= _capability(arch) <= _FIRST_PTXAS_UP_TO:
        return {"TRITON_PTXAS_BLACKWELL_PATH": "{triton}/backends/nvidia/bin/ptxas"}
    return {}


def numerics() -> Mapping[str, object]:
    return {"fp_fusion": False, "denormals": "preserve"}


def toolchain(arch: str, versions: Mapping[str, str]) -> Mapping[str, str]:
    # A Triton without the second ptxas assembles every arch with the first.
    second = _capability(arch) > _FIRST_PTXAS_UP_TO and "ptxas-blackwell" in versions
    return {"triton": versions["triton"], "ptxas": versions["ptxas-blackwell" if second else "ptxas"]}


def min_driver(toolchain: Mapping[str, str]) -> int:
    """As cuDriverGetVersion counts: 1000 * major + 10 * minor.

    Machine code runs on every driver of its toolkit's major version or a later one (CUDA's minor-version
    compatibility: any 12.x toolkit on a 525 driver, any 13.x on a 580 one); only PTX, of which a bundle holds
    none, needs the minor as well.
    """
    return 1000 * int(toolchain["ptxas"].partition(".")[0])


# .nv.info.<kernel>: entries of (format, attribute, ...). Format 4 has a 16-bit length and that many bytes;
# the others have a 16-bit value in place. A parameter's entry: index, then ordinal and offset of 16 bits
# each, then a word whose bits 18 and up are its size.
_WITH_LENGTH = 4
_KPARAM_INFO = 0x17
_MIN_STACK_SIZE = 0x12
_REGISTER_COUNT = 0x2F


def _attributes(binary: bytes, section: str) -> list[tuple[int, bytes]]:
    data = elf.read(binary).section(section).data
    found: list[tuple[int, bytes]] = []
    at = 0
    while at + 4 <= len(data):
        form, attribute, length = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _WITH_LENGTH:
            if at + length > len(data):
                raise ValueError(f"ELF section {section} is cut off")
            found.append((attribute, data[at : at + length]))
            at += length
    return found


def _unpack(form: str, data: bytes) -> tuple[int, ...]:
    try:
        return struct.unpack(form, data)
    except struct.error:
        raise ValueError(f"the cubin holds an attribute of {len(data)} bytes, wanted another size") from None


def parameters(binary: bytes, entry: str) -> tuple[Parameter, ...]:
    found: dict[int, Parameter] = {}
    for attribute, data in _attributes(binary, f".nv.info.{entry}"):
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, packed = _unpack("<IHHI", data)
            found[ordinal] = Parameter(offset, packed >> 18)
    if sorted(found) != list(range(len(found))):
        raise ValueError(f"the cubin numbers its parameters {sorted(found)}")
    return tuple(found[i] for i in range(len(found)))


def resources(binary: bytes, entry: str) -> Mapping[str, int]:
    found = {_REGISTER_COUNT: 0, _MIN_STACK_SIZE: 0}
    for attribute, data in _attributes(binary, ".nv.info"):
        if attribute in found:
            _, value = _unpack("<II", data)
            found[attribute] = max(found[attribute], value)
    if not found[_REGISTER_COUNT]:
        raise ValueError("the cubin does not say how many registers its kernel takes")
    return {"registers": found[_REGISTER_COUNT], "spill_bytes": found[_MIN_STACK_SIZE]}
