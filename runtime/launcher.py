"""Loads a launcher, the C shared object of one target, out of a bundle: no file is written where the kernel
offers memory files, so a read-only host will do.

A process loads each launcher once, whatever the number of operators and devices; it is never unloaded (the
launcher itself counts opens and closes for each device, and releases the device's modules at the last).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .errors import BundleError, DeviceError

_DEVICE_ERROR = "DeviceError: "
_ELF_MACHINES = {62: "x86_64", 183: "aarch64"}

# Linux's own numbers: Python's modules have them only where the libc it was built with had.
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_F_ADD_SEALS = 1033
_SEAL_EVERYTHING = 1 | 2 | 4 | 8

_loaded: dict[str, Launcher] = {}
_lock = threading.Lock()
_spellings = itertools.count()


class Launcher:
    """The functions of one loaded launcher. Safe to use from several threads.

    compress: the raw TVM-FFI function; raises what the launcher raises.
    use_stream: where the launcher has to be told of a thread's stream, use_stream(device, stream); else None.
    library:  the shared object itself.
    several:  whether more than one device was opened through this launcher.
    """

    def __init__(self, library: ctypes.CDLL, sha256: str) -> None:
        self.compress: Callable[..., None] = _function(library, "compress", sha256)
        self._open = _function(library, "open", sha256)
        self._close = _function(library, "close", sha256)
        self._counters = _function(library, "counters", sha256)
        told = hasattr(library, "__tvm_ffi_use_stream")
        self.use_stream: Callable[[int, int], None] | None = (
            _function(library, "use_stream", sha256) if told else None
        )
        self.library = library
        self._devices: set[int] = set()
        self._sha256 = sha256
        self.several = False

    def bind(self, *arguments: Any) -> Any:
        """Binds the fixed operands and returns the raw TVM-FFI function of a step; raises what the launcher
        raises, BundleError where it is too old to bind."""
        return _function(self.library, "bind", self._sha256)(*arguments)

    def open(self, device_id: int, manifest: bytes, blobs: Mapping[str, bytes]) -> None:
        """Prepares a device. BundleError where the launcher and the bundle disagree, DeviceError where the
        driver refuses."""
        try:
            self._open(device_id, manifest, dict(blobs))
        except (TypeError, ValueError) as error:
            raise BundleError(f"entry {self._sha256}: the launcher refused the bundle: {error}") from None
        except RuntimeError as error:
            raise device_error(error) or error from None
        self._devices.add(device_id)
        self.several = len(self._devices) > 1

    def close(self, device_id: int) -> None:
        """Undoes one `open`; the last one unloads the device's modules."""
        try:
            self._close(device_id)
        except RuntimeError as error:
            raise device_error(error) or error from None

    def pin(self, device_id: int, variant: int) -> None:
        """Makes every call on the device launch that variant, by its place in the manifest; -1: its choice.

        BundleError where the launcher is too old to do so, ValueError where it has no such variant.
        """
        try:
            _function(self.library, "pin", self._sha256)(device_id, variant)
        except RuntimeError as error:
            raise device_error(error) or error from None

    def counters(self, device_id: int) -> tuple[int, ...]:
        """Calls, calls of a general variant, then the launches of each variant in the manifest's order."""
        try:
            data = bytes(self._counters(device_id))
        except RuntimeError as error:
            raise device_error(error) or error from None
        return struct.unpack(f"<{len(data) // 8}q", data)


def load_launcher(sha256: str, content: bytes, machine: str) -> Launcher:
    """The launcher of that sha256, loaded from `content` where this process has not loaded it yet.

    Raises BundleError where it is for another machine or does not load here.
    """
    with _lock:
        launcher = _loaded.get(sha256)
        if launcher is None:
            launcher = Launcher(_load_library(content, sha256, machine), sha256)
            _loaded[sha256] = launcher
        return launcher


def device_error(error: BaseException) -> DeviceError | None:
    """The DeviceError that a launcher's RuntimeError stands for, if it does."""
    text = str(error)
    return DeviceError(text[len(_DEVICE_ERROR) :]) if text.startswith(_DEVICE_ERROR) else None


def _load_library(content: bytes, sha256: str, machine: str) -> ctypes.CDLL:
    _check_elf(content, sha256, machine)
    # Loaded first, and globally: the launcher resolves its TVM-FFI symbols from it.
    import tvm_ffi  # noqa: F401

    refusals = []
    for place in (_memory_file, _temporary_file):
        try:
            with place(content) as path:
                return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            refusals.append(str(error))
    raise BundleError(
        f"entry {sha256}: wanted to load the launcher from memory or from a temporary file, found: "
        f"{'; '.join(refusals)}; let the process make memory files (memfd_create, /proc mounted), or point "
        "TMPDIR at a folder whose mount allows execution"
    )


def _check_elf(content: bytes, sha256: str, machine: str) -> None:
    if content[:6] != b"\x7fELF\x02\x01" or len(content) < 64:
        raise BundleError(f"entry {sha256}: wanted a 64-bit little-endian ELF launcher, found another format")
    number = struct.unpack_from("<H", content, 18)[0]
    found = _ELF_MACHINES.get(number, f"ELF machine {number}")
    if found != machine:
        raise BundleError(f"entry {sha256}: wanted a launcher for {machine}, found one for {found}")


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[str]:
    """A path under /proc that names a sealed file in memory, until the context ends.

    The dynamic linker knows libraries by path, and a descriptor's number is soon another file's: each library
    gets a spelling of its own (one more "./"), so that no later one is taken for it.
    """
    handle = _memfd_create()
    try:
        with os.fdopen(os.dup(handle), "wb") as file:
            file.write(content)
        fcntl.fcntl(handle, _F_ADD_SEALS, _SEAL_EVERYTHING)
        yield f"/proc/self/fd/{'./' * next(_spellings)}{handle}"
    finally:
        os.close(handle)


def _memfd_create() -> int:
    """memfd_create, also for a Python that was built against too old a libc to offer it."""
    number = _MEMFD_CREATE.get(os.uname().machine)
    if number is None:
        raise OSError(f"no memfd_create known for {os.uname().machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    handle = int(libc.syscall(number, b"kvbuild-launcher", _MFD_CLOEXEC | _MFD_ALLOW_SEALING))
    if handle < 0:
        raise OSError(ctypes.get_errno(), f"memfd_create: {os.strerror(ctypes.get_errno())}")
    return handle


@contextlib.contextmanager
def _temporary_file(content: bytes) -> Iterator[str]:
    """A file of this user's alone, gone from its folder when the context ends; the mapping outlives it."""
    with tempfile.NamedTemporaryFile(prefix="kvbuild-", suffix=".so") as file:
        file.write(content)
        file.flush()
        yield file.name


def _function(library: ctypes.CDLL, name: str, sha256: str) -> Any:
    import tvm_ffi

    symbol = f"__tvm_ffi_{name}"
    try:
        address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
    except AttributeError:
        raise BundleError(f"entry {sha256}: wanted a launcher that exports {symbol}, found none") from None
    return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=library)


def _fresh_lock() -> None:
    """A child of fork may inherit the lock held by a thread that it does not have."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_fresh_lock)
