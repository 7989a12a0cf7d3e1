"""AMD: code objects (hsaco) by Triton and the LLVM in its wheel."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ...kernels.gpgpu.route import KernelForm
from .. import elf
from . import Parameter

T = TypeVar("T")

ROUTE = "gpgpu"
ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
TOOLS = ("triton",)
BINARY = "hsaco"
SECTION_KEYS: Mapping[str, Callable[[Any], object]] = {}

_EM_AMDGPU = 224
# Bytes of shared memory a block, where it is not 64 KiB.
_LDS = {"gfx950": 160 << 10}
_NOTE_METADATA = 32


def triton_target(arch: str) -> tuple[str, int | str, int]:
    return ("hip", arch, warp_size(arch))


def warp_size(arch: str) -> int:
    return 64 if arch.startswith("gfx9") else 32


def elf_machine(arch: str) -> int:
    return _EM_AMDGPU


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


def _kernel(binary: bytes, entry: str) -> Mapping[str, Any]:
    for kernel in _member(_metadata(binary), "amdhsa.kernels", list):
        if _member(kernel, ".name", str) == entry:
            return dict(kernel)
    raise ValueError(f"the code object's metadata names no kernel {entry}")


def _member(value: Any, name: str, kind: type[T]) -> T:
    found = value.get(name) if isinstance(value, dict) else None
    if type(found) is not kind:
        raise ValueError(f"the code object's metadata has no {name} that is a {kind.__name__}")
    return found


def parameters(binary: bytes, entry: str) -> tuple[Parameter, ...]:
    arguments = _member(_kernel(binary, entry), ".args", list)
    return tuple(Parameter(_member(arg, ".offset", int), _member(arg, ".size", int)) for arg in arguments)


def resources(binary: bytes, entry: str) -> Mapping[str, int]:
    kernel = _kernel(binary, entry)
    names = {"registers": ".vgpr_count", "spill_bytes": ".private_segment_fixed_size"}
    return {name: _member(kernel, member, int) for name, member in names.items()}


def _metadata(binary: bytes) -> Mapping[str, Any]:
    data = elf.read(binary).section(".note").data
    at = 0
    while at + 12 <= len(data):
        name_size, size, kind = struct.unpack_from("<III", data, at)
        start = at + 12 + -(-name_size // 4) * 4
        if kind == _NOTE_METADATA and data[at + 12 : at + 12 + name_size] == b"AMDGPU\0":
            value, _ = _unpack(data, start)
            if isinstance(value, dict):
                return value
            break
        at = start + -(-size // 4) * 4
    raise ValueError("the code object has no AMDGPU metadata note")


_FIXED = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_SIZED = {
    0xC4: ("bin", ">B"), 0xC5: ("bin", ">H"), 0xC6: ("bin", ">I"),
    0xD9: ("str", ">B"), 0xDA: ("str", ">H"), 0xDB: ("str", ">I"),
    0xDC: ("list", ">H"), 0xDD: ("list", ">I"), 0xDE: ("map", ">H"), 0xDF: ("map", ">I"),
}  # fmt: skip


def _unpack(data: bytes, at: int) -> tuple[Any, int]:
    """One MessagePack value at `at`, and where the next begins. ValueError where it is cut off."""
    try:
        return _value(data, at)
    except (struct.error, IndexError):
        raise ValueError("the code object's metadata is cut off") from None
    except (TypeError, RecursionError):  # a map or list as a key; nested without end
        raise ValueError("the code object's metadata is no MessagePack that a compiler writes") from None


def _value(data: bytes, at: int) -> tuple[Any, int]:
    tag = data[at]
    at += 1
    if tag < 0x80:
        return tag, at
    if tag >= 0xE0:
        return tag - 0x100, at
    if tag in _FIXED:
        return _FIXED[tag], at
    if tag in _NUMBERS:
        form = _NUMBERS[tag]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if tag in _SIZED:
        kind, form = _SIZED[tag]
        count = struct.unpack_from(form, data, at)[0]
        at += struct.calcsize(form)
    elif tag < 0xC0:
        kind, count = ("map", "list", "str", "str")[(tag - 0x80) >> 4], tag & (0x1F if tag >= 0xA0 else 0x0F)
    else:
        raise ValueError(f"the code object's metadata holds the unknown MessagePack tag {tag:#x}")
    if kind in ("str", "bin"):
        raw = data[at : at + count]
        if len(raw) != count:
            raise IndexError
        return (raw.decode() if kind == "str" else raw), at + count
    items: list[Any] = []
    for _ in range(count * (2 if kind == "map" else 1)):
        item, at = _value(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if kind == "map" else items), at
