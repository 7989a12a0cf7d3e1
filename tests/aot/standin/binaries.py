"""Made-up device binaries: what each vendor's compiler writes, as far as it is known, around no code."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from kvbuild.aot import offload
from kvbuild.aot.assemble import argument_size, natural_offsets

Signature = Sequence[tuple[str, str]]

# Where the registry and public sources tell no ELF machine, the made-up binaries have one of their own.
MACHINES = {
    "nvidia": 190, "amd": 224, "hygon": 224, "metax": 253, "mthreads": 253, "tianshu": 4660, "thead": 4661,
}  # fmt: skip
_NATIVE = "maca-mxc-metax-macahca--xcore1000"


def elf(machine: int, sections: Mapping[str, bytes]) -> bytes:
    """A 64-bit little-endian ELF file with those sections, and the table of their names."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".shstrtab"))
    contents = [*sections.values(), names]
    offsets, at = [], 64
    for data in contents:
        offsets.append(at)
        at += len(data)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, machine, 1, 0, 0, at, 0, 64, 0, 0, 64,
        len(contents) + 1, len(contents),
    )  # fmt: skip
    rows = [bytes(64)]
    for name, offset, data in zip((*sections, ".shstrtab"), offsets, contents, strict=True):
        start = names.index(b"\0" + name.encode() + b"\0") + 1
        rows.append(struct.pack("<IIQQQQIIQQ", start, 1, 0, 0, offset, len(data), 0, 0, 1, 0))
    return header + b"".join(contents) + b"".join(rows)


def pack(value: object) -> bytes:
    """MessagePack of maps, lists, texts and small numbers."""
    if isinstance(value, dict):
        head = b"\xde" + struct.pack(">H", len(value))
        return head + b"".join(pack(key) + pack(each) for key, each in value.items())
    if isinstance(value, list):
        return b"\xdc" + struct.pack(">H", len(value)) + b"".join(map(pack, value))
    if isinstance(value, str):
        return b"\xd9" + struct.pack(">B", len(value)) + value.encode()
    assert isinstance(value, int)
    return b"\xcd" + struct.pack(">H", value)


def note(owner: str, kind: int, content: bytes) -> bytes:
    name = owner.encode() + b"\0"
    padded = name.ljust(-(-len(name) // 4) * 4, b"\0")
    return struct.pack("<III", len(name), len(content), kind) + padded + content + bytes(-len(content) % 4)


def bundle(members: Mapping[str, bytes]) -> bytes:
    directory_size = sum(24 + len(name) for name in members)
    at = len(offload.MAGIC) + 8 + directory_size
    directory, body = b"", b""
    for name, data in members.items():
        directory += struct.pack("<QQQ", at + len(body), len(data), len(name)) + name.encode()
        body += data
    return offload.MAGIC + struct.pack("<Q", len(members)) + directory + body


def made_up(vendor: str, entry: str, signature: Signature, hidden: int, tag: str = "") -> bytes:
    """What a vendor's compiler writes for one kernel of that name, with that many hidden pointers; tag tells
    files apart."""
    kinds = (*(kind for _, kind in signature), *["*u8"] * hidden)
    places = list(zip(natural_offsets(kinds), map(argument_size, kinds), strict=True))
    code = {".text": b"", ".comment": tag.encode(), ".strtab": b"\0" + entry.encode() + b"\0"}
    machine = MACHINES[vendor]
    if vendor in ("amd", "hygon"):
        arguments = [{".offset": offset, ".size": size} for offset, size in places]
        kernel = {".name": entry, ".args": arguments, ".vgpr_count": 32, ".private_segment_fixed_size": 0}
        return elf(machine, {**code, ".note": note("AMDGPU", 32, pack({"amdhsa.kernels": [kernel]}))})
    if vendor == "metax":
        passed = [
            {".arg_param_pass": "global_buffer", ".arg_offset_bytes": offset, ".arg_size_bytes": size}
            for offset, size in places
        ]
        runtime = {".arg_param_pass": "hidden_none", ".arg_offset_bytes": 800, ".arg_size_bytes": 8}
        kernels = {"macahca.kernels": [{".name": entry, ".args": [*passed, runtime]}]}
        native = elf(machine, {**code, ".note": note("MetaX", 0x30, pack(kernels))})
        host = "host-x86_64-unknown-linux-gnu"
        return bundle({host: b"", f"{_NATIVE}-bc": b"bitcode", _NATIVE: native})
    if vendor == "mthreads":
        return elf(machine, {**code, ".note": note("MTGPU", 0x40, b"not public")})
    if vendor == "thead":
        return elf(machine, {**code, f".hg_info.{entry}": b"not public"})
    return elf(machine, code)
