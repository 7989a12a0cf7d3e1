from __future__ import annotations

import sys

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
