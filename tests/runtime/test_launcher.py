"""A launcher out of memory: one library a process, never mistaken for another, refused in words."""

from __future__ import annotations

import hashlib
import os
import signal
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbuild.runtime import launcher as module
from kvbuild.runtime.errors import BundleError, DeviceError
from kvbuild.runtime.launcher import Launcher, load_launcher

Build = Callable[..., bytes]


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_loaded", dict(module._loaded))


def load(samples: Any, content: bytes, name: str = "") -> Launcher:
    return load_launcher(name or hashlib.sha256(content).hexdigest(), content, samples.machine)


def refused() -> int:
    raise PermissionError(1, "Operation not permitted")


def marks(launcher: Launcher) -> int:
    """Which stand-in this is: what it writes."""
    cache = np.zeros(4, np.uint8)
    launcher.compress(*[np.zeros(1)] * 8, cache, 8, 128, 1.0e-6)
    return int(cache[0])


def test_it_loads_once_and_leaves_no_descriptor(samples: Any, stand_in_launcher: Build) -> None:
    import tvm_ffi  # noqa: F401

    content = stand_in_launcher()
    before = len(os.listdir("/proc/self/fd"))
    first = load(samples, content)
    assert load(samples, content) is first
    assert len(os.listdir("/proc/self/fd")) == before
    assert marks(first) == 42


def test_one_launcher_is_never_taken_for_another(samples: Any, stand_in_launcher: Build) -> None:
    """The descriptors' numbers repeat; the dynamic linker must not give back the older library."""
    assert [marks(load(samples, stand_in_launcher(mark))) for mark in (1, 2, 3)] == [1, 2, 3]


def test_without_memory_files_a_temporary_file_does(
    samples: Any, stand_in_launcher: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_memfd_create", refused)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    launcher = load(samples, stand_in_launcher(4))
    assert marks(launcher) == 4 and not list(tmp_path.iterdir())


def test_with_neither_the_error_says_what_to_do(
    samples: Any, stand_in_launcher: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_memfd_create", refused)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(BundleError, match=r"Operation not permitted.*absent.*TMPDIR"):
        load(samples, stand_in_launcher(5))


def test_the_memory_is_sealed(stand_in_launcher: Build) -> None:
    with (
        module._memory_file(stand_in_launcher()) as path,
        pytest.raises(PermissionError),
        open(path, "r+b") as file,
    ):
        file.write(b"x")
        file.flush()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "wanted a 64-bit little-endian ELF launcher"),
        (b"MZ" + bytes(100), "wanted a 64-bit little-endian ELF launcher"),
        (b"\x7fELF\x01\x01" + bytes(100), "wanted a 64-bit little-endian ELF launcher"),
        (
            b"\x7fELF\x02\x01" + bytes(12) + struct.pack("<H", 190) + bytes(60),
            "found one for ELF machine 190",
        ),
        (b"\x7fELF\x02\x01" + bytes(12) + struct.pack("<H", 21) + bytes(60), "found one for ELF machine 21"),
    ],
    ids=["empty", "exe", "32 bits", "cubin", "ppc"],
)
def test_what_is_no_launcher_for_this_machine(samples: Any, content: bytes, words: str) -> None:
    with pytest.raises(BundleError, match=words):
        load(samples, content, "f" * 64)


def test_a_library_that_does_not_load(samples: Any, stand_in_launcher: Build) -> None:
    content = stand_in_launcher()
    with pytest.raises(BundleError, match="wanted to load the launcher"):
        load(samples, content[:64] + b"\xff" * (len(content) - 64), "e" * 64)


def test_a_library_without_the_functions(samples: Any, stand_in_driver: Path) -> None:
    with pytest.raises(BundleError, match="exports __tvm_ffi_compress, found none"):
        load(samples, stand_in_driver.read_bytes())


def test_open_and_close_speak_the_runtimes_errors(samples: Any, stand_in_launcher: Build) -> None:
    launcher = load(samples, stand_in_launcher(6))
    with pytest.raises(DeviceError, match=r"^CUDA_ERROR_NO_DEVICE: nothing there$"):
        launcher.open(9, b"{}", {})
    with pytest.raises(BundleError, match="the launcher refused the bundle: manifest: wanted another"):
        launcher.open(8, b"{}", {})
    assert not launcher.several
    launcher.open(1, b"{}", {"a" * 64: b"blob"})
    launcher.open(1, b"{}", {})
    assert not launcher.several
    launcher.open(2, b"{}", {})
    assert launcher.several
    assert launcher.counters(1) == (0, 2)
    for _ in range(2):
        launcher.close(1)
    with pytest.raises(DeviceError, match="closed more often than opened"):
        launcher.close(1)


def test_a_child_of_fork_can_load_while_the_parent_held_the_lock(
    samples: Any, stand_in_launcher: Build
) -> None:
    content = stand_in_launcher(7)
    with module._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # a child that waits for ever is a failure, not a leftover
            os._exit(0 if marks(load(samples, content)) == 7 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_library_outlives_every_reference(samples: Any, stand_in_launcher: Build) -> None:
    compress = load(samples, stand_in_launcher(8)).compress
    module._loaded.clear()
    cache = np.zeros(4, np.uint8)
    compress(*[np.zeros(1)] * 8, cache, 8, 128, 1.0e-6)
    assert cache[0] == 8
