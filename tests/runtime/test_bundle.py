"""Damage: every byte of a bundle is checked, and an error names the entry."""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbuild.runtime import archive
from kvbuild.runtime.bundle import open_bundle
from kvbuild.runtime.errors import BundleError
from kvbuild.runtime.manifest import MANIFEST_NAME


@pytest.fixture
def whole(samples: Any, tmp_path: Path) -> Path:
    manifest, blobs = samples.mixed()
    return samples.write(tmp_path / "whole.kvb", manifest, blobs)


def read_all(path: Path | str) -> None:
    with open_bundle(path) as bundle:
        bundle.verify()


def refusal(path: Path | str) -> str:
    with pytest.raises(BundleError) as error:
        read_all(path)
    message = str(error.value)
    assert str(path) in message
    return message


def some_offsets(data: bytes) -> list[int]:
    """Every offset outside the manifest's text, and every eleventh in it."""
    start = archive.LOCAL_SIZE + len(MANIFEST_NAME)
    end = start + struct.unpack_from("<L", data, 22)[0]
    return [offset for offset in range(len(data)) if not start < offset < end or offset % 11 == 0]


def test_a_whole_bundle_gives_back_what_went_in(samples: Any, whole: Path) -> None:
    manifest, blobs = samples.mixed()
    with open_bundle(whole) as bundle:
        bundle.verify()
        assert bundle.manifest.to_json() == manifest
        assert {name: bundle.read(name) for name in blobs} == blobs
        assert bundle.size == whole.stat().st_size
        with zipfile.ZipFile(whole) as plain:
            assert plain.comment.decode() == bundle.digest
            assert plain.read(MANIFEST_NAME) == bundle.manifest_bytes
    with pytest.raises(KeyError):
        bundle.read(MANIFEST_NAME)


def test_it_is_a_plain_zip_with_stored_sorted_fixed_time_entries(samples: Any, whole: Path) -> None:
    with zipfile.ZipFile(whole) as plain:
        assert plain.testzip() is None
        entries = plain.infolist()
    assert [entry.filename for entry in entries] == [MANIFEST_NAME, *sorted(samples.mixed()[1])]
    assert {entry.compress_type for entry in entries} == {zipfile.ZIP_STORED}
    assert {entry.date_time for entry in entries} == {(1980, 1, 1, 0, 0, 0)}
    assert not any(entry.extra or entry.comment for entry in entries)


def test_no_byte_can_change_unseen(whole: Path) -> None:
    data = whole.read_bytes()
    broken = whole.with_name("flipped.kvb")
    for offset in some_offsets(data):
        changed = bytearray(data)
        changed[offset] ^= 1 << offset % 8
        broken.write_bytes(changed)
        refusal(broken)


def test_the_damaged_entry_is_named(samples: Any, whole: Path) -> None:
    data = whole.read_bytes()
    _, blobs = samples.mixed()
    for name, content in blobs.items():
        broken = whole.with_name("blob.kvb")
        broken.write_bytes(data.replace(content, content[:-1] + b"?"))
        assert f"entry {name}: wanted content of that sha256" in refusal(broken)
        with open_bundle(broken) as bundle:
            for other in set(blobs) - {name}:
                assert bundle.read(other) == blobs[other]
    broken.write_bytes(data.replace(b'"kvbuild":"0.1.0"', b'"kvbuild":"0.1.1"'))
    assert "entry manifest.json: wanted CRC" in refusal(broken)
    broken.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert "entry manifest.json: wanted sha256" in refusal(broken)
    broken.write_bytes(data[:-86] + b"X" + data[-85:])
    assert "entry end record" in refusal(broken)


def test_a_cut_file_is_refused_at_every_length(whole: Path) -> None:
    data = whole.read_bytes()
    broken = whole.with_name("cut.kvb")
    for length in some_offsets(data):
        broken.write_bytes(data[:length])
        refusal(broken)
    broken.write_bytes(data[: len(data) // 2 + 200])
    assert "it was cut" in refusal(broken) or "the file's end" in refusal(broken)
    broken.write_bytes(data[:-1])
    assert "it was cut" in refusal(broken)


@pytest.mark.parametrize(
    "tail", [b"\0", b"x" * 100, b"PK\x05\x06" + bytes(18)], ids=["one", "many", "zip end"]
)
def test_trailing_data_is_refused(whole: Path, tail: bytes) -> None:
    broken = whole.with_name("long.kvb")
    broken.write_bytes(whole.read_bytes() + tail)
    assert "data after the archive's end" in refusal(broken)


def test_a_second_bundle_behind_the_first_is_refused(whole: Path) -> None:
    broken = whole.with_name("twice.kvb")
    broken.write_bytes(whole.read_bytes() * 2)
    assert "data after the archive's end" in refusal(broken)


def test_leading_data_is_refused(whole: Path) -> None:
    broken = whole.with_name("led.kvb")
    broken.write_bytes(b"#!/bin/sh\n" + whole.read_bytes())
    assert "found a script" in refusal(broken)


Rewrite = Callable[[zipfile.ZipFile, list[tuple[zipfile.ZipInfo, bytes]]], None]


def rewritten(whole: Path, rewrite: Rewrite) -> Path:
    """The same content through another zip writer, with a right comment."""
    with zipfile.ZipFile(whole) as plain:
        entries = [(entry, plain.read(entry)) for entry in plain.infolist()]
        comment = plain.comment
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        rewrite(target, entries)
        target.comment = comment
    result = whole.with_name("rewritten.kvb")
    result.write_bytes(buffer.getvalue())
    return result


def put(target: zipfile.ZipFile, entry: zipfile.ZipInfo, content: bytes, **changes: Any) -> None:
    fresh = zipfile.ZipInfo(entry.filename, entry.date_time)
    fresh.create_version, fresh.extract_version = 20, 10
    fresh.external_attr = 0o100644 << 16
    for name, value in changes.items():
        setattr(fresh, name, value)
    target.writestr(fresh, content)


def all_but_last(change: dict[str, Any]) -> Rewrite:
    def rewrite(target: zipfile.ZipFile, entries: list[tuple[zipfile.ZipInfo, bytes]]) -> None:
        for entry, content in entries[:-1]:
            put(target, entry, content)
        put(target, *entries[-1], **change)

    return rewrite


def reordered(target: zipfile.ZipFile, entries: list[tuple[zipfile.ZipInfo, bytes]]) -> None:
    for entry, content in [entries[0], *reversed(entries[1:])]:
        put(target, entry, content)


def manifest_last(target: zipfile.ZipFile, entries: list[tuple[zipfile.ZipInfo, bytes]]) -> None:
    for entry, content in [*entries[1:], entries[0]]:
        put(target, entry, content)


def duplicated(target: zipfile.ZipFile, entries: list[tuple[zipfile.ZipInfo, bytes]]) -> None:
    for entry, content in entries:
        put(target, entry, content)
    put(target, *entries[-1])


def one_more(target: zipfile.ZipFile, entries: list[tuple[zipfile.ZipInfo, bytes]]) -> None:
    for entry, content in entries:
        put(target, entry, content)
    put(target, zipfile.ZipInfo("../../etc/passwd"), b"root")


def one_less(target: zipfile.ZipFile, entries: list[tuple[zipfile.ZipInfo, bytes]]) -> None:
    for entry, content in entries[:-1]:
        put(target, entry, content)


def compressed_manifest(target: zipfile.ZipFile, entries: list[tuple[zipfile.ZipInfo, bytes]]) -> None:
    for entry, content in entries:
        method = zipfile.ZIP_DEFLATED if entry.filename == MANIFEST_NAME else zipfile.ZIP_STORED
        put(target, entry, content, compress_type=method)


def test_the_rewriter_alone_changes_nothing(whole: Path) -> None:
    same = rewritten(whole, all_but_last({}))
    assert same.read_bytes() == whole.read_bytes()
    read_all(same)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "rewrite",
    [
        reordered,
        manifest_last,
        duplicated,
        one_more,
        one_less,
        compressed_manifest,
        all_but_last({"compress_type": zipfile.ZIP_DEFLATED}),
        all_but_last({"date_time": (2024, 1, 1, 0, 0, 0)}),
        all_but_last({"comment": b"hello"}),
        all_but_last({"extra": struct.pack("<HH", 0x7075, 0)}),
        all_but_last({"external_attr": 0o100755 << 16}),
        all_but_last({"filename": "0" * 64}),
        all_but_last({"filename": "../" + "0" * 61}),
    ],
    ids=[
        "reordered", "manifest last", "duplicate", "extra entry", "missing entry", "compressed manifest",
        "compressed blob", "dated", "entry comment", "extra field", "executable", "renamed", "path",
    ],
)  # fmt: skip
def test_another_form_of_the_same_content_is_refused(whole: Path, rewrite: Rewrite) -> None:
    refusal(rewritten(whole, rewrite))


def test_a_compressed_entry_is_called_that(samples: Any, whole: Path) -> None:
    compressed = rewritten(whole, all_but_last({"compress_type": zipfile.ZIP_DEFLATED}))
    message = refusal(compressed)
    assert "a compressed entry" in message and max(samples.mixed()[1]) in message


def test_an_encrypted_entry_is_called_that(whole: Path) -> None:
    data = bytearray(whole.read_bytes())
    data[6] |= 1
    broken = whole.with_name("encrypted.kvb")
    broken.write_bytes(data)
    assert "entry manifest.json" in refusal(broken) and "an encrypted entry" in refusal(broken)


def canonical_file(path: Path, text: bytes, blobs: dict[str, bytes]) -> Path:
    """A file of canonical structure around any manifest text."""
    where = archive.layout(len(text), {name: len(content) for name, content in blobs.items()})
    contents = [text, *(blobs[name] for name in sorted(blobs))]
    crcs = [zlib.crc32(content) for content in contents]
    parts = []
    for entry, content, crc in zip(where.entries, contents, crcs, strict=True):
        parts += [archive.header(entry, crc), content]
    path.write_bytes(b"".join([*parts, archive.trailer(where, crcs, hashlib.sha256(text).hexdigest())]))
    return path


def test_a_newer_schema_says_who_reads_it(tmp_path: Path) -> None:
    path = canonical_file(tmp_path / "newer.kvb", b'{"kvbuild":"7.0.0","schema":3,"x":1}', {})
    assert "found 3; kvbuild 7.0.0 or newer reads it" in refusal(path)


def test_a_manifest_in_another_form_is_refused(samples: Any, tmp_path: Path) -> None:
    manifest, blobs = samples.mixed()
    path = canonical_file(tmp_path / "spaced.kvb", json.dumps(manifest).encode(), blobs)
    assert "canonical JSON" in refusal(path)


def test_a_blob_that_is_not_its_name_is_refused_though_all_else_fits(samples: Any, tmp_path: Path) -> None:
    manifest, blobs = samples.mixed()
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    name = min(blobs)
    path = canonical_file(tmp_path / "forged.kvb", text, {**blobs, name: b"!" * len(blobs[name])})
    assert f"entry {name}: wanted content of that sha256" in refusal(path)


def test_a_crc_that_is_not_the_contents_is_refused_though_the_sha256_fits(samples: Any, whole: Path) -> None:
    name = max(samples.mixed()[1])
    with open_bundle(whole) as bundle:
        crc = struct.pack("<L", zlib.crc32(bundle.read(name)))
    data = whole.read_bytes()
    assert data.count(crc) == 2
    whole.write_bytes(data.replace(crc, b"\0\1\2\3"))
    assert f"entry {name}: wanted CRC" in refusal(whole)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "an empty file"),
        (b"P", "the file's end"),
        (b"\x7fELF" + bytes(60), "an ELF file"),
        (b'{"schema": 1}', "text that starts like JSON"),
        (b"PK\x05\x06" + bytes(18), "an empty zip"),
        (b"hello world", "starts with the bytes 68656c6c"),
        (bytes(4096), "starts with the bytes 00000000"),
    ],
    ids=["empty", "one byte", "elf", "json", "empty zip", "text", "zeros"],
)
def test_foreign_files(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "foreign.kvb"
    path.write_bytes(content)
    assert words in refusal(path)


def test_a_foreign_zip(tmp_path: Path) -> None:
    path = tmp_path / "foreign.zip"
    with zipfile.ZipFile(path, "w") as target:
        target.writestr("triton_kernels/kernel.hsaco", b"x")
    assert "a zip whose first entry is 'triton_kernels/kernel.hsaco'" in refusal(path)


def test_what_is_not_a_readable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "found none of that name" in refusal(tmp_path / "absent.kvb")
    assert "found a folder" in refusal(tmp_path)
    assert "not a regular file" in refusal("/dev/null")
    os.mkfifo(tmp_path / "pipe.kvb")
    assert "not a regular file" in refusal(tmp_path / "pipe.kvb")
    (tmp_path / "loop").symlink_to("loop")
    assert "check the path" in refusal(tmp_path / "loop")
    with pytest.raises(BundleError, match="null"):
        open_bundle("a\0b")
    with pytest.raises(TypeError, match="path: wanted a path, found int"):
        open_bundle(3)  # type: ignore[arg-type]

    def denied(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    assert "found no permission" in refusal(tmp_path / "mine.kvb")


def test_a_file_that_shrinks_while_open_is_an_error(samples: Any, whole: Path) -> None:
    _, blobs = samples.mixed()
    with open_bundle(whole) as bundle:
        os.truncate(whole, 100)
        with pytest.raises(BundleError, match="the file's end"):
            bundle.read(max(blobs))


def test_a_closed_bundle_says_so(samples: Any, whole: Path) -> None:
    bundle = open_bundle(whole)
    bundle.close()
    bundle.close()
    with pytest.raises(ValueError, match="the bundle is closed"):
        bundle.read(max(samples.mixed()[1]))


def test_a_refused_file_leaves_no_descriptor(whole: Path) -> None:
    whole.write_bytes(whole.read_bytes()[:-1])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        refusal(whole)
    assert len(os.listdir("/proc/self/fd")) == before
