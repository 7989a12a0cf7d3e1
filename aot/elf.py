"""The few facts the builder reads from an ELF file: its machine, its sections, their bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_MAX_NAME = 4096

# e_machine values that the ELF registry gives to somebody whose code must not be taken for another's.
REGISTERED = {0: "none", 62: "x86-64", 183: "AArch64", 190: "NVIDIA CUDA", 224: "AMD GPU"}


@dataclass(frozen=True)
class Section:
    name: str
    view: memoryview

    @property
    def data(self) -> bytes:
        return bytes(self.view)


@dataclass(frozen=True)
class Elf:
    """A 64-bit little-endian ELF file."""

    machine: int
    sections: tuple[Section, ...]

    def has_symbol(self, name: str) -> bool:
        """Whether a string table of its symbols holds that name."""
        wanted = name.encode() + b"\0"
        tables = (section.data for section in self.sections if section.name in (".strtab", ".dynstr"))
        return any(b"\0" + wanted in table or table.startswith(wanted) for table in tables)

    def section(self, name: str) -> Section:
        """The section of that name; ValueError says which there are."""
        for section in self.sections:
            if section.name == name:
                return section
        raise ValueError(f"ELF section {name} is missing; found {', '.join(s.name for s in self.sections)}")


def read(data: bytes) -> Elf:
    """Parses the headers and sections. ValueError where the bytes are no whole 64-bit little-endian ELF."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"wanted a 64-bit little-endian ELF file, found {data[:6]!r}")
    try:
        header = _HEADER.unpack_from(data)
        machine, offset, size, count, names_at = header[2], header[6], header[11], header[12], header[13]
        rows = [_SECTION.unpack_from(data, offset + i * size) for i in range(count)]
        names = data[rows[names_at][4] : rows[names_at][4] + rows[names_at][5]] if rows else b""
        names += b"\0"
    except (struct.error, IndexError, OverflowError) as error:
        raise ValueError(f"the ELF headers are cut off: {error}") from None
    # Views: a file may name itself as the content of thousands of sections.
    whole = memoryview(data)
    sections = []
    for name, kind, _, _, start, length, *_ in rows:
        no_bits = 8
        content = whole[:0] if kind == no_bits else whole[start : start + length]
        if kind != no_bits and len(content) != length:
            raise ValueError("an ELF section is cut off")
        end = names.find(b"\0", name, name + _MAX_NAME)
        if end < 0:
            raise ValueError("an ELF section's name is cut off")
        sections.append(Section(names[name:end].decode(), content))
    return Elf(machine, tuple(sections))
