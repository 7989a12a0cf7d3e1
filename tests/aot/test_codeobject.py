from __future__ import annotations

import random
import struct

import binaries
import pytest

from kvbuild.aot import codeobject
from kvbuild.aot.codeobject import Notes

NOTES = Notes(b"Maker", 7, "maker.kernels", ".at", ".bytes")
KERNELS = {
    "maker.kernels": [
        {".name": "first", ".args": []},
        {".name": "second", ".args": [{".at": 8, ".bytes": 4}]},
    ]
}


def with_notes(*notes: bytes, section: str = ".note.maker") -> bytes:
    return binaries.elf(253, {".text": b"", section: b"".join(notes)})


@pytest.mark.parametrize(
    "packed", [b"\x81\x90\x01", b"\x81\x80\x01", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff\x01"], ids=repr
)
def test_messagepack_that_no_compiler_writes_is_a_value_error(packed: bytes) -> None:
    with pytest.raises(ValueError, match="metadata"):
        codeobject.unpack(packed, 0)


@pytest.mark.parametrize(
    ("packed", "value"),
    [
        (b"\x07", 7),
        (b"\xff", -1),
        (b"\xc0", None),
        (b"\xc2", False),
        (b"\xc3", True),
        (b"\xcc\xff", 255),
        (b"\xcd\x01\x00", 256),
        (b"\xce\x00\x01\x00\x00", 65536),
        (b"\xd1\xff\xfe", -2),
        (b"\xcb" + struct.pack(">d", 1.5), 1.5),
        (b"\xa3abc", "abc"),
        (b"\xd9\x02ab", "ab"),
        (b"\xc4\x01\x00", b"\x00"),
        (b"\x92\x01\xa1x", [1, "x"]),
        (b"\xdc\x00\x01\x05", [5]),
        (b"\x81\xa1k\x90", {"k": []}),
        (b"\xde\x00\x01\xa1k\x05", {"k": 5}),
    ],
)
def test_messagepack_values(packed: bytes, value: object) -> None:
    assert codeobject.unpack(packed, 0) == (value, len(packed))
    if len(packed) > 1:
        with pytest.raises(ValueError, match="cut off"):
            codeobject.unpack(packed[:-1], 0)


def test_an_unknown_messagepack_tag_is_named() -> None:
    with pytest.raises(ValueError, match="0xc1"):
        codeobject.unpack(b"\xc1", 0)


def test_a_kernel_is_found_behind_other_notes() -> None:
    binary = with_notes(
        binaries.note("GNU", 3, b"build id"),
        binaries.note("Maker", 8, binaries.pack({"maker.kernels": []})),
        binaries.note("Maker", 7, binaries.pack(KERNELS)),
    )
    kernel = NOTES.kernel(binary, "second")
    assert NOTES.place(kernel[".args"][0]) == (8, 4)
    assert codeobject.owners(binary) == {b"GNU", b"Maker"}
    with pytest.raises(ValueError, match="names no kernel third"):
        NOTES.kernel(binary, "third")


@pytest.mark.parametrize(
    ("binary", "text"),
    [
        (with_notes(binaries.note("GNU", 7, binaries.pack(KERNELS))), "has no Maker metadata note"),
        (with_notes(binaries.note("Maker", 7, binaries.pack(KERNELS)), section=".data"), "no Maker metadata"),
        (with_notes(binaries.note("Maker", 7, binaries.pack([]))), "has no Maker metadata note"),
        (with_notes(binaries.note("Maker", 7, binaries.pack({}))), "no maker.kernels that is a list"),
        (with_notes(binaries.note("Maker", 7, binaries.pack(KERNELS)[:40])), "cut off"),
        (b"no ELF", "wanted a 64-bit little-endian ELF file"),
    ],
)
def test_metadata_that_cannot_be_read_is_a_value_error(binary: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        NOTES.kernel(binary, "first")


def test_notes_without_end_are_a_value_error() -> None:
    # Of a megabyte of zeros each twelve are an empty note, and thousands of sections may name the same ones.
    with pytest.raises(ValueError, match="wanted at most 1000 ELF notes, found more"):
        codeobject.owners(binaries.elf(224, {".note": bytes(1 << 20)}))


def test_no_damage_is_anything_but_a_value_error() -> None:
    data = with_notes(binaries.note("Maker", 7, binaries.pack(KERNELS)))
    chance, outcomes = random.Random(1), set()
    for _ in range(2000):
        broken = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            broken[chance.randrange(len(broken))] = chance.choice((0, 1, 0x80, 0xDD, 0xFF))
        try:
            NOTES.kernel(bytes(broken), "second")
            outcomes.add("read")
        except ValueError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
