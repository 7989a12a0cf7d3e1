"""The one form a bundle's bytes may have: a zip whose every structural byte follows from its manifest.

    manifest.json, then each blob under its sha256, in sorted order; each entry stored, dated 1980-01-01,
    with no extra field; then the central directory; then the end record, whose comment is the sha256 of
    manifest.json in hex. Nothing before, between or after.

Given the manifest (names and sizes) and the entries' CRCs, `headers` and `trailer` return every byte of
the archive that is not an entry's content. Writer and reader both use them: the reader compares what it
found with what it must be, so there is no second form to be lenient about.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .manifest import MANIFEST_NAME

LOCAL_SIZE = 30
CENTRAL_SIZE = 46
END_SIZE = 22
COMMENT_SIZE = 64
LOCAL_MAGIC = b"PK\x03\x04"
END_MAGIC = b"PK\x05\x06"

# Without zip64, offsets, sizes and counts end here; a value of all ones would announce zip64.
MAX_BYTES = 0xFFFFFFFE
MAX_ENTRIES = 0xFFFE

_CENTRAL_MAGIC = b"PK\x01\x02"
_VERSION_NEEDED = 10
_MADE_BY_UNIX = 3 << 8 | 20
_DATE_1980_01_01 = 0x21
_REGULAR_FILE_0644 = 0o100644 << 16


@dataclass(frozen=True)
class Entry:
    """One entry's place: `header` and `start` are the offsets of its local header and of its content."""

    name: str
    size: int
    header: int

    @property
    def start(self) -> int:
        return self.header + LOCAL_SIZE + len(self.name)

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class Layout:
    """Where everything lies: the entries in order, the central directory, and the file's size in bytes."""

    entries: tuple[Entry, ...]
    directory: int
    total: int


def layout(manifest_size: int, blobs: Mapping[str, int]) -> Layout:
    """The layout for a manifest of this many bytes and these blobs. ValueError where it needs zip64."""
    entries: list[Entry] = []
    offset = directory_size = 0
    for name, size in [(MANIFEST_NAME, manifest_size), *sorted(blobs.items())]:
        entry = Entry(name, size, offset)
        entries.append(entry)
        offset = entry.end
        directory_size += CENTRAL_SIZE + len(name)
    total = offset + directory_size + END_SIZE + COMMENT_SIZE
    if total > MAX_BYTES or len(entries) > MAX_ENTRIES:
        raise ValueError(
            f"wanted at most {MAX_BYTES} bytes in {MAX_ENTRIES} entries, found {total} in {len(entries)}"
        )
    return Layout(tuple(entries), offset, total)


def header(entry: Entry, crc: int) -> bytes:
    """The local header that precedes the entry's content."""
    fields = (_VERSION_NEEDED, 0, 0, 0, _DATE_1980_01_01, crc, entry.size, entry.size, len(entry.name), 0)
    return struct.pack("<4s5H3L2H", LOCAL_MAGIC, *fields) + entry.name.encode()


def trailer(where: Layout, crcs: Sequence[int], comment: str) -> bytes:
    """Everything after the last entry's content: the central directory and the end record."""
    parts = []
    for entry, crc in zip(where.entries, crcs, strict=True):
        fields = (_MADE_BY_UNIX, _VERSION_NEEDED, 0, 0, 0, _DATE_1980_01_01, crc, entry.size, entry.size)
        rest = (len(entry.name), 0, 0, 0, 0, _REGULAR_FILE_0644, entry.header)
        parts.append(struct.pack("<4s6H3L5H2L", _CENTRAL_MAGIC, *fields, *rest) + entry.name.encode())
    directory = b"".join(parts)
    count = len(where.entries)
    end = (0, 0, count, count, len(directory), where.directory, COMMENT_SIZE)
    return directory + struct.pack("<4s4H2LH", END_MAGIC, *end) + comment.encode()


def stored_crc(local_header: bytes) -> int:
    """The CRC-32 field of a local header; nothing else of it can vary."""
    return int(struct.unpack_from("<L", local_header, 14)[0])
