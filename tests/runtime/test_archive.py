"""The canonical layout: offsets, and the limits of a zip without its 64-bit extension."""

from __future__ import annotations

import pytest

from kvbuild.runtime import archive


def test_offsets_follow_from_names_and_sizes() -> None:
    where = archive.layout(10, {"b" * 64: 7, "a" * 64: 5})
    assert [entry.name[0] for entry in where.entries] == ["m", "a", "b"]
    assert [entry.start for entry in where.entries] == [43, 43 + 10 + 94, 43 + 10 + 94 + 5 + 94]
    assert where.directory == where.entries[-1].end
    crcs = [1, 2, 0xFFFFFFFF]
    assert where.total == where.directory + len(archive.trailer(where, crcs, "0" * 64))
    for entry, crc in zip(where.entries, crcs, strict=True):
        assert len(archive.header(entry, crc)) == entry.start - entry.header
        assert archive.stored_crc(archive.header(entry, crc)) == crc


def test_more_than_a_plain_zip_can_say_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 4294967294 bytes"):
        archive.layout(10, {"a" * 64: 2**32 - 200})
    archive.layout(10, {"a" * 64: 2**32 - 1000})
    with pytest.raises(ValueError, match="in 65534 entries"):
        archive.layout(10, {f"{number:064}": 1 for number in range(65534)})
