"""What a device binary says of its own appetite: registers and stack bytes a thread.

Read from the ELF file itself, so that no vendor tool is needed. An unknown form gives None.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

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
        if binary[:6] != b"\x7fELF\x02\x01":
            return None
        machine = struct.unpack_from("<H", binary, 18)[0]
        if machine == EM_CUDA:
            return _nvidia(binary)
        if machine == EM_AMDGPU:
            return _amd(binary)
    except (struct.error, IndexError):
        pass
    return None


def _sections(binary: bytes) -> Iterator[tuple[str, bytes]]:
    table, size, count, names_at = (
        *struct.unpack_from("<Q", binary, 40),
        *struct.unpack_from("<HHH", binary, 58),
    )
    headers = [struct.unpack_from("<IIQQQQ", binary, table + index * size) for index in range(count)]
    names = headers[names_at][4]
    for name, kind, _flags, _address, offset, length in headers:
        end = binary.index(b"\0", names + name)
        content = b"" if kind == 8 else binary[offset : offset + length]
        yield binary[names + name : end].decode("ascii", "replace"), content


def _nvidia(binary: bytes) -> Usage | None:
    registers: list[int] = []
    frames = [0]
    for name, content in _sections(binary):
        if name != ".nv.info":
            continue
        at = 0
        while at + 4 <= len(content):
            form, attribute, size = struct.unpack_from("<BBH", content, at)
            if (form, attribute) == _NV_REGISTERS:
                registers.append(struct.unpack_from("<I", content, at + 8)[0])
            if (form, attribute) == _NV_FRAME:
                frames.append(struct.unpack_from("<I", content, at + 8)[0])
            at += 4 + (size if form == _NV_SIZED_FORMAT else 0)
    return Usage(max(registers), max(frames)) if registers else None


def _amd(binary: bytes) -> Usage | None:
    for name, content in _sections(binary):
        if name == ".note":
            registers = _message_pack_int(content, b".vgpr_count")
            stack = _message_pack_int(content, b".private_segment_fixed_size")
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
