from __future__ import annotations

import random
import struct

import binaries
import pytest

from kvbuild.aot import offload

MEMBERS = {"host-x": b"", "device-one": b"code of one", "device-two": b"two"}


def test_members_are_found_by_their_identifiers() -> None:
    assert offload.members(binaries.bundle(MEMBERS)) == MEMBERS
    assert offload.members(binaries.bundle({})) == {}


@pytest.mark.parametrize("end", range(1, 100, 7))
def test_what_is_cut_off_is_a_value_error(end: int) -> None:
    whole = binaries.bundle(MEMBERS)
    with pytest.raises(ValueError, match="cut off|wanted an offload bundle"):
        offload.members(whole[:-end])


def test_members_that_each_name_the_whole_file_cost_nothing() -> None:
    count, code = 20_000, bytes(8 << 20)
    names = b"".join(struct.pack("<QQQ", 0, len(code), 6) + b"%06d" % index for index in range(count))
    found = offload.members(offload.MAGIC + struct.pack("<Q", count) + names + code)
    assert len(found) == count and found["000007"][: len(offload.MAGIC)] == offload.MAGIC


def test_something_else_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="wanted an offload bundle, found b'.*ELF'"):
        offload.members(b"\x7fELF")


def test_no_damage_is_anything_but_a_value_error() -> None:
    whole, chance, outcomes = binaries.bundle(MEMBERS), random.Random(1), set()
    for _ in range(2000):
        broken = bytearray(whole)
        broken[chance.randrange(len(broken))] = chance.choice((0, 1, 0x7F, 0xFF))
        try:
            offload.members(bytes(broken))
            outcomes.add("read")
        except ValueError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
