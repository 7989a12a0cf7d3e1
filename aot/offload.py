"""Offload bundles, the container that clang-based compilers put code for several targets into.

A magic word, a count, a directory of (offset, size, length of the identifier, identifier), then the members.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
_COUNT = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQQ")
_MAX_NAME = 4096


def members(data: bytes) -> Mapping[str, memoryview]:
    """Each member by its identifier. ValueError where the bytes are no whole offload bundle."""
    if not data.startswith(MAGIC):
        raise ValueError(f"wanted an offload bundle, found {data[: len(MAGIC)]!r}")
    found: dict[str, memoryview] = {}
    # Views: thousands of members may each name the whole file.
    whole = memoryview(data)
    try:
        (count,) = _COUNT.unpack_from(data, len(MAGIC))
        at = len(MAGIC) + _COUNT.size
        for _ in range(count):
            start, size, length = _ENTRY.unpack_from(data, at)
            at += _ENTRY.size
            name = data[at : at + min(length, _MAX_NAME)]
            at += length
            if len(name) != length or start + size > len(data):
                raise ValueError("the offload bundle is cut off")
            found[name.decode()] = whole[start : start + size]
    except struct.error:
        raise ValueError("the offload bundle is cut off") from None
    return found
