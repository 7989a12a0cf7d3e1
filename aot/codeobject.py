"""Code objects: ELF files with a note that describes their kernels in MessagePack, as AMD began it.

Other vendors write the same thing under other names; `Notes` holds the names.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from . import elf

T = TypeVar("T")

_HEADER = struct.Struct("<III")
_MAX_OWNER = 64
_MAX_NOTES = 1000


@dataclass(frozen=True)
class Notes:
    """How a vendor's note is found and what it calls things.

    owner, kind: of the ELF note. kernels: the member of the map that lists the kernels, each with `.name` and
    `.args`. offset, size: what an argument calls its place and size in the parameter space, in bytes.
    """

    owner: bytes
    kind: int
    kernels: str
    offset: str
    size: str

    def kernel(self, binary: bytes, entry: str) -> Mapping[str, Any]:
        """What the note says of one kernel. ValueError where it cannot be read or names no such kernel."""
        for kernel in member(self._map(binary), self.kernels, list):
            if member(kernel, ".name", str) == entry:
                return dict(kernel)
        raise ValueError(f"the code object's metadata names no kernel {entry}")

    def place(self, argument: object) -> tuple[int, int]:
        """Offset and size of one of a kernel's `.args`."""
        return member(argument, self.offset, int), member(argument, self.size, int)

    def _map(self, binary: bytes) -> Mapping[str, Any]:
        for owner, kind, section, start in _notes(binary):
            if (owner, kind) == (self.owner, self.kind):
                value, _ = unpack(bytes(section), start)
                if isinstance(value, dict):
                    return value
        raise ValueError(f"the code object has no {self.owner.decode()} metadata note")


def owners(binary: bytes) -> set[bytes]:
    """Whose notes an ELF file holds. ValueError where it is none."""
    return {owner for owner, *_ in _notes(binary)}


def _notes(binary: bytes) -> Iterator[tuple[bytes, int, memoryview, int]]:
    """Owner, kind, section and place in it of the content of each ELF note."""
    count = 0
    for section in elf.read(binary).sections:
        if not section.name.startswith(".note"):
            continue
        data, at = section.view, 0
        while at + _HEADER.size <= len(data):
            count += 1
            if count > _MAX_NOTES:
                raise ValueError(f"wanted at most {_MAX_NOTES} ELF notes, found more")
            name_size, size, kind = _HEADER.unpack_from(data, at)
            start = at + _HEADER.size + -(-name_size // 4) * 4
            name = at + _HEADER.size
            yield bytes(data[name : name + min(name_size, _MAX_OWNER)]).rstrip(b"\0"), kind, data, start
            at = start + -(-size // 4) * 4


AMDGPU = Notes(b"AMDGPU", 32, "amdhsa.kernels", ".offset", ".size")


def member(value: object, name: str, kind: type[T]) -> T:
    """value[name], which is a `kind`; else ValueError."""
    found = value.get(name) if isinstance(value, dict) else None
    if type(found) is not kind:
        raise ValueError(f"the code object's metadata has no {name} that is a {kind.__name__}")
    return found


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


def unpack(data: bytes, at: int) -> tuple[Any, int]:
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
