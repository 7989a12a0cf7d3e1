from __future__ import annotations

import contextlib
import random
import struct
import sys
import tracemalloc

import pytest

from kvbuild.aot import elf


def host_binary() -> bytes:
    with open(sys.executable, "rb") as file:
        return file.read()


def test_a_host_binary_is_read() -> None:
    read = elf.read(host_binary())
    assert read.machine in (62, 183)
    assert read.section(".interp").data.startswith(b"/lib")
    assert read.section(".bss").data == b""


def test_a_missing_section_is_named() -> None:
    with pytest.raises(ValueError, match=r"ELF section .nope is missing; found .*\.text"):
        elf.read(host_binary()).section(".nope")


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF\x01\x01" + b"\0" * 80, b"\x7fELF\x02\x01", host_binary()[:-200]]
)
def test_what_is_no_whole_elf_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        elf.read(data)


def test_many_sections_that_span_the_file_take_no_memory() -> None:
    count = 3000
    size = 64 + count * 64
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 0, 64, 0, 64, 0, 0, 64, count, 0
    )
    data = header + struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, 1, size - 1, 0, 0, 0, 0) * count
    tracemalloc.start()
    try:
        assert len(elf.read(data).sections) == count
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


def test_no_damage_is_anything_but_a_value_error() -> None:
    data, chance = host_binary(), random.Random(1)
    sections = int.from_bytes(data[40:48], "little")
    for _ in range(300):
        broken = bytearray(data)
        for _ in range(chance.randrange(1, 8)):
            at = chance.choice((chance.randrange(64), chance.randrange(sections, len(data))))
            broken[at] = chance.randrange(256)
        with contextlib.suppress(ValueError):
            elf.read(bytes(broken))
