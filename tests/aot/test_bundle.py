"""Writing bundles: equal bytes from equal content, whole files or none, and merging."""

from __future__ import annotations

import copy
import errno
import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbuild.aot import bundle as module
from kvbuild.aot.bundle import merge, write
from kvbuild.aot.errors import BuildError, RequestError
from kvbuild.runtime.bundle import open_bundle
from kvbuild.runtime.errors import BundleError
from kvbuild.runtime.manifest import Manifest, launch_table_digest


def cpu_target(arch: str, launcher: bytes, version: str = "0.17.1") -> dict[str, Any]:
    return {
        "vendor": "cpu",
        "arch": arch,
        "route": "cpu",
        "warp_size": 0,
        "elf_machine": 62,
        "min_driver": 0,
        "toolchain": {"zig": version},
        "numerics": {"fp_fusion": False, "denormals": "preserve"},
        "source_digest": "0" * 64,
        "launchers": {f"{arch}-linux-gnu.2.17": hashlib.sha256(launcher).hexdigest()},
        "launch_table": launch_table_digest((), ()),
        "kernels": [],
        "variants": [],
    }


def sample(
    *launchers: tuple[str, bytes], kvbuild: str = "0.1.0", zig: str = "0.17.1"
) -> tuple[Manifest, dict[str, bytes]]:
    """A manifest with one cpu target for each (arch, launcher), and its blobs."""
    blobs = {hashlib.sha256(content).hexdigest(): content for _, content in launchers}
    value = {
        "schema": 1,
        "kvbuild": kvbuild,
        "operator": "c128_256_512_compress",
        "targets": [cpu_target(arch, content, zig) for arch, content in sorted(launchers)],
        "blobs": {name: len(content) for name, content in blobs.items()},
    }
    return Manifest.from_json(value), blobs


X86, ARM = ("x86_64", b"a launcher"), ("aarch64", b"another launcher")


def put(path: Path, *launchers: tuple[str, bytes], **changes: str) -> Path:
    write(path, *sample(*launchers, **changes))
    return path


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    manifest, blobs = sample(X86, ARM)
    write(tmp_path / "one.kvb", manifest, blobs)
    (tmp_path / "elsewhere").mkdir()
    shuffled = copy.copy(manifest)
    object.__setattr__(shuffled, "blobs", dict(reversed(list(manifest.blobs.items()))))
    write(tmp_path / "elsewhere" / "two.kvb", shuffled, {"f" * 64: b"of no use", **blobs})
    data = (tmp_path / "one.kvb").read_bytes()
    assert (tmp_path / "elsewhere" / "two.kvb").read_bytes() == data
    with open_bundle(tmp_path / "one.kvb") as bundle:
        bundle.verify()
        assert bundle.manifest == manifest


def test_an_older_file_is_replaced_and_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.kvb"
    path.write_bytes(b"old" * 10_000)
    put(path, X86)
    with open_bundle(path) as bundle:
        bundle.verify()
    assert os.listdir(tmp_path) == ["x.kvb"]


def test_the_umask_decides_the_mode(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        put(tmp_path / "x.kvb", X86)
    finally:
        os.umask(before)
    assert (tmp_path / "x.kvb").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda blobs: blobs.clear(), "found none"),
        (lambda blobs: blobs.update(dict.fromkeys(blobs, b"!")), "of that sha256"),
    ],
    ids=["missing", "wrong"],
)
def test_a_blob_must_be_there_and_be_its_name(tmp_path: Path, spoil: Any, words: str) -> None:
    manifest, blobs = sample(X86)
    spoil(blobs)
    with pytest.raises(ValueError, match=words):
        write(tmp_path / "x.kvb", manifest, blobs)
    assert not os.listdir(tmp_path)


def test_a_manifest_that_no_reader_takes_is_not_written(tmp_path: Path) -> None:
    manifest, blobs = sample(X86)
    object.__setattr__(manifest.targets[0], "launch_table", "0" * 64)
    with pytest.raises(BundleError, match="launch_table"):
        write(tmp_path / "x.kvb", manifest, blobs)
    assert not os.listdir(tmp_path)


class Huge(bytes):
    """Content whose length is a claim."""

    def __len__(self) -> int:
        return 2**32


def test_four_gigabytes_are_refused_by_name(tmp_path: Path) -> None:
    manifest, blobs = sample(X86)
    (name,) = blobs
    object.__setattr__(manifest, "blobs", {name: 2**32})
    with pytest.raises(RequestError, match=r"x.kvb: wanted at most 4294967294 bytes"):
        write(tmp_path / "x.kvb", manifest, {name: Huge(blobs[name])})


def broken_off(error: BaseException) -> Callable[[Iterable[bytes]], Iterator[bytes]]:
    """Chunks that end in an error half-way."""

    def chunks(_: Any, text: bytes, __: Any) -> Iterator[bytes]:
        yield text
        raise error

    return chunks  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), BuildError),
        (OSError(errno.EIO, "Input/output error"), BuildError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MemoryError(), MemoryError),
    ],
    ids=["full disk", "failing disk", "interrupt", "no memory"],
)
@pytest.mark.parametrize("old", [None, b"the old file"], ids=["new", "replacing"])
def test_a_failure_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, kind: type, old: bytes | None
) -> None:
    path = tmp_path / "x.kvb"
    if old is not None:
        path.write_bytes(old)
    monkeypatch.setattr(module, "_chunks", broken_off(error))
    with pytest.raises(kind) as raised:
        put(path, X86)
    assert type(raised.value) is kind
    assert os.listdir(tmp_path) == ([] if old is None else ["x.kvb"])
    assert old is None or path.read_bytes() == old


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_at_the_last_step_leaves_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(BuildError, match=r"No space left on device; make room"):
        put(tmp_path / "x.kvb", X86)
    assert not os.listdir(tmp_path)


def test_content_is_on_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def watched(*arguments: Any, real: Any = real, name: str = name) -> None:
            folder = name == "fsync" and os.path.isdir(f"/proc/self/fd/{arguments[0]}")
            steps.append("sync folder" if folder else name)
            real(*arguments)

        monkeypatch.setattr(os, name, watched)
    put(tmp_path / "x.kvb", X86)
    assert steps == ["fsync", "replace", "sync folder"]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "absent" / "x.kvb", "No such file or directory"),
        (tmp_path, "found a folder"),
        (Path("/dev/null"), "not a regular file"),
        (tmp_path / ("n" * 300), "File name too long"),
    ):
        with pytest.raises(RequestError, match=words) as error:
            put(path, X86)
        assert str(path) in str(error.value)
    assert not os.listdir(tmp_path)


def test_a_long_name_is_fine_as_long_as_the_folder_takes_it(tmp_path: Path) -> None:
    put(tmp_path / ("n" * 251 + ".kvb"), X86)


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = put(tmp_path / "x.kvb", X86)
    stop = threading.Event()

    def rewrite() -> None:
        for launcher in itertools.cycle((X86, ("x86_64", b"a longer launcher" * 999))):
            if stop.is_set():
                return
            put(path, launcher)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(100):
            with open_bundle(path) as bundle:
                bundle.verify()
    finally:
        stop.set()
        writer.join()


def test_merging_is_the_union_whatever_the_order(tmp_path: Path) -> None:
    one, two = put(tmp_path / "one.kvb", X86), put(tmp_path / "two.kvb", ARM)
    both = put(tmp_path / "both.kvb", X86, ARM)
    for index, paths in enumerate(itertools.permutations((one, two, both))):
        out = tmp_path / f"merged-{index}.kvb"
        manifest = merge(paths, out)
        assert out.read_bytes() == both.read_bytes()
        assert [target.name for target in manifest.targets] == ["cpu:aarch64", "cpu:x86_64"]


def test_merging_into_an_input_is_safe(tmp_path: Path) -> None:
    one, two = put(tmp_path / "one.kvb", X86), put(tmp_path / "two.kvb", ARM)
    merge([one, two], one)
    assert one.read_bytes() == put(tmp_path / "both.kvb", X86, ARM).read_bytes()


def test_a_target_that_differs_is_refused_naming_both_files(tmp_path: Path) -> None:
    one = put(tmp_path / "one.kvb", X86, ARM)
    two = put(tmp_path / "two.kvb", X86, zig="0.18.0")
    with pytest.raises(RequestError) as error:
        merge([one, two], tmp_path / "out.kvb")
    message = str(error.value)
    assert message.startswith("cpu:x86_64: wanted the same content") and "differ in toolchain;" in message
    assert str(one) in message and str(two) in message
    assert not (tmp_path / "out.kvb").exists()


def test_the_newest_writer_is_recorded(tmp_path: Path) -> None:
    one = put(tmp_path / "one.kvb", X86, kvbuild="0.9.0")
    two = put(tmp_path / "two.kvb", ARM, kvbuild="0.10.0")
    assert merge([one, two], tmp_path / "out.kvb").kvbuild == "0.10.0"
    assert merge([two, one], tmp_path / "out.kvb").kvbuild == "0.10.0"


def test_damaged_and_foreign_inputs_are_refused(tmp_path: Path) -> None:
    good, bad = put(tmp_path / "good.kvb", X86), put(tmp_path / "bad.kvb", ARM)
    bad.write_bytes(bad.read_bytes().replace(b"another launcher", b"Another launcher"))
    with pytest.raises(BundleError, match=r"bad.kvb: entry [0-9a-f]{64}: wanted content"):
        merge([good, bad], tmp_path / "out.kvb")
    with pytest.raises(BundleError, match=r"absent.kvb: wanted a bundle file"):
        merge([good, tmp_path / "absent.kvb"], tmp_path / "out.kvb")
    with pytest.raises(RequestError, match="wanted one bundle or more"):
        merge([], tmp_path / "out.kvb")
    assert not (tmp_path / "out.kvb").exists()
