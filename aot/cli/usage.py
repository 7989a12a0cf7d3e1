"""What a device binary says of its own appetite: registers and stack bytes a thread.

Read from the ELF file itself, so that no vendor tool is needed. An unknown form gives None.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .. import elf

EM_CUDA = 190
EM_AMDGPU = 224

# Attributes of a cubin's .nv.info section: (format << 8 | attribute), then a 16-bit size and that many bytes;
# these two hold a symbol index and the value, 32 bits each.
_NV_REGISTERS = (0x04, 0x2F)
_NV_FRAME = (0x04, 0x11)
_NV_SIZED_FORMAT = 0x04


@dataclass(frozen=True)
class Usage:
    """Registers and stack bytes of one thread, of the kernel in the binary that uses the most."""

    registers: int
    stack: int


def usage(binary: bytes) -> Usage | None:
    """The usage recorded in a cubin or an AMD code object; None where the form is not known."""
    try:
        file = elf.read(binary)
        if file.machine == EM_CUDA:
            return _nvidia(file)
        if file.machine == EM_AMDGPU:
            return _amd(file)
    except (ValueError, struct.error, IndexError):
        pass
    return None


def _nvidia(file: elf.Elf) -> Usage | None:
    registers: list[int] = []
    frames = [0]
    for section in file.sections:
        if section.name != ".nv.info":
            continue
        at, content = 0, section.data
        while at + 4 <= len(content):
            form, attribute, size = struct.unpack_from("<BBH", content, at)
            if (form, attribute) == _NV_REGISTERS:
                registers.append(struct.unpack_from("<I", content, at + 8)[0])
            if (form, attribute) == _NV_FRAME:
                frames.append(struct.unpack_from("<I", content, at + 8)[0])
            at += 4 + (size if form == _NV_SIZED_FORMAT else 0)
    return Usage(max(registers), max(frames)) if registers else None


def _amd(file: elf.Elf) -> Usage | None:
    for section in file.sections:
        if section.name == ".note":
            registers = _message_pack_int(section.data, b".vgpr_count")
            stack = _message_pack_int(section.data, b".private_segment_fixed_size")
            if registers is not None:
                return Usage(registers, stack or 0)
    return None


def _message_pack_int(content: bytes, key: bytes) -> int | None:
    """The unsigned integer after a key in MessagePack bytes."""
    at = content.find(key)
    if at < 0:
        return None
    at += len(key)
    first = content[at]
    if first < 0x80:
        return first
    form = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}.get(first)
    return None if form is None else int(struct.unpack_from(form, content, at + 1)[0])
