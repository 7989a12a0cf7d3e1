from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from kvbuild.aot.cache import Cache, Entry, default_folder
from kvbuild.aot.errors import BuildError, RequestError

KEY = hashlib.sha256(b"key").hexdigest()


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_what_was_put_comes_back(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.get(KEY) is None
    entry = Entry(b"\n\x00bytes\n", {"entry": "add", "shared": 3})
    cache.put(KEY, entry)
    assert cache.get(KEY) == entry
    assert Cache(tmp_path).get(KEY) == entry
    cache.put(KEY, Entry(b"", {}))
    assert cache.get(KEY) == Entry(b"", {})


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "extend"])
def test_a_damaged_entry_is_missing_said_and_replaced(tmp_path: Path, damage: str) -> None:
    notes: list[str] = []
    cache = Cache(tmp_path, notes.append)
    cache.put(KEY, Entry(b"abcdef", {"a": 1}))
    (path,) = files(tmp_path)
    content = path.read_bytes()
    path.write_bytes(
        {
            "flip": content[:-1] + bytes([content[-1] ^ 1]),
            "cut": content[:-1],
            "empty": b"",
            "extend": content + b"x",
        }[damage]
    )
    assert cache.get(KEY) is None
    assert notes == [f"cache: {path} is damaged; it is made anew"]
    cache.put(KEY, Entry(b"new", {}))
    assert cache.get(KEY) == Entry(b"new", {})


def test_an_entry_under_another_key_is_missing(tmp_path: Path) -> None:
    notes: list[str] = []
    cache = Cache(tmp_path, notes.append)
    cache.put(KEY, Entry(b"abc", {}))
    (path,) = files(tmp_path)
    other = path.name[:2] + "0" * 62
    path.rename(path.with_name(other))
    assert cache.get(other) is None
    assert "belongs to another key" in notes[0]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BuildError, match="No space left on device; make room or set KVBUILD_CACHE"):
        cache.put(KEY, Entry(b"abc", {}))
    assert files(tmp_path) == []


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cache.put(KEY, Entry(b"abc", {}))
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"Not a directory; set KVBUILD_CACHE to another folder"):
        Cache(tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"KVBUILD_CACHE": "here", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "here"),
        ({"KVBUILD_CACHE": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/kvbuild"),
        ({"XDG_CACHE_HOME": "x", "HOME": "/h"}, "/h/.cache/kvbuild"),
        ({"HOME": "/h"}, "/h/.cache/kvbuild"),
    ],
)
def test_the_folder_is_the_named_one_or_the_platforms(environ: dict[str, str], folder: str) -> None:
    assert default_folder(environ) == Path(folder)


@pytest.mark.parametrize("environ", [{}, {"HOME": ""}])
def test_without_home_the_variable_is_asked_for(environ: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="HOME is not set; set KVBUILD_CACHE"):
        default_folder(environ)


def content(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest() * 20_000


def _hammer(folder: str, seed: int) -> None:
    def fail(text: str) -> None:
        raise AssertionError(text)

    cache = Cache(Path(folder), fail)
    for step in range(24):
        number = (seed + step) % 6
        key = hashlib.sha256(str(number).encode()).hexdigest()
        found = cache.get(key)
        assert found is None or found.data == content(number)
        cache.put(key, Entry(content(number), {"n": number}))


def test_eight_builders_at_once_never_see_half_an_entry(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_hammer, args=(str(tmp_path), seed)) for seed in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    assert len(files(tmp_path)) == 6


@pytest.mark.parametrize("head", [b"", b"5", b"[]", b"{}", b"{", b"\xff", b"[" * 5000, b'{"key": 1}'])
def test_an_entry_of_another_program_is_missing(tmp_path: Path, head: bytes) -> None:
    """Its digest is right, but it is none of ours: anyone may write to a shared folder."""
    notes: list[str] = []
    cache = Cache(tmp_path, notes.append)
    cache.put(KEY, Entry(b"abc", {}))
    (path,) = files(tmp_path)
    rest = head + b"\nabc"
    path.write_bytes(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
    assert cache.get(KEY) is None
    assert len(notes) == 1 and str(path) in notes[0]


def test_a_folder_removed_during_a_build_is_made_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    cache.put(KEY, Entry(b"abc", {}))
    assert cache.get(KEY) == Entry(b"abc", {})
