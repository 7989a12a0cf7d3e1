"""Opens a bundle and hands out its contents, each checked before it is used.

`open_bundle` reads the manifest and every structural byte of the archive, and compares them with the bytes
that kvbuild.runtime.archive says they must be: local headers, central directory, end record, the file's
length. What remains are the blobs' contents, which `Bundle.read` compares with their sha256 (and CRC) each
time it is called. Together that leaves no byte of the file unchecked, and `load` reads only the blobs of the
target it uses; `Bundle.verify` reads them all.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import zlib
from types import TracebackType

from . import archive
from .errors import BundleError
from .manifest import MANIFEST_NAME, Manifest

# A kernel takes about 3 KiB of a manifest, so that thousands fit; parsed JSON may take 20 times its length.
MAX_MANIFEST_SIZE = 16 << 20

_FOREIGN = (
    (b"\x7fELF", "an ELF file (a shared object, or a device binary)"),
    (b"#!", "a script"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x28\xb5\x2f\xfd", "a zstandard file"),
    (archive.END_MAGIC, "an empty zip"),
    (b"{", "text that starts like JSON"),
)


def open_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Opens the file and checks its manifest and its structure. Raises BundleError naming the entry."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: wanted a path, found {type(path).__name__}")
    name = os.fsdecode(path)
    source = _Source(name)
    try:
        return _read(source)
    except BaseException:
        source.close()
        raise


class Bundle:
    """An open bundle. Safe to use from several threads; close it, or use it as a context manager.

    manifest: the checked manifest.
    digest:   the sha256 of manifest.json, which names the whole content.
    """

    def __init__(
        self, source: _Source, manifest: Manifest, text: bytes, where: archive.Layout, crcs: list[int]
    ) -> None:
        self._source = source
        self._entries = {
            entry.name: (entry, crc) for entry, crc in zip(where.entries, crcs, strict=True) if entry.header
        }
        self.manifest = manifest
        self.manifest_bytes = text
        self.digest = hashlib.sha256(text).hexdigest()
        self.path = source.path
        self.size = where.total

    def read(self, blob: str) -> bytes:
        """A blob's content, checked. KeyError where the manifest has no such blob; BundleError if damaged."""
        entry, crc = self._entries[blob]
        content = self._source.read(entry.start, entry.size, entry.name)
        found = hashlib.sha256(content).hexdigest()
        if found != blob:
            raise self._source.damage(entry.name, f"wanted content of that sha256, found {found}")
        if zlib.crc32(content) != crc:
            wanted = f"wanted CRC {zlib.crc32(content):08x} in its header, found {crc:08x}"
            raise self._source.damage(entry.name, wanted)
        return content

    def verify(self) -> None:
        """Reads and checks every blob. Raises BundleError naming the first that is damaged."""
        for blob in self._entries:
            self.read(blob)

    def close(self) -> None:
        """Closes the file; `read` and `verify` are over."""
        self._source.close()

    def __enter__(self) -> Bundle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Source:
    """The open file. Reads at offsets, so threads need no lock; plain reads, so a file that shrinks under us
    is an error and not a signal."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._handle = -1
        try:
            # Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self._handle)
        except (OSError, ValueError) as error:
            raise self._cannot_open(error) from None
        if not stat.S_ISREG(status.st_mode):
            self.close()
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "something that is not a regular file"
            raise BundleError(f"{path}: wanted a bundle file, found {kind}; name the .kvb file itself")
        self.size = status.st_size

    def _cannot_open(self, error: OSError | ValueError) -> BundleError:
        if isinstance(error, FileNotFoundError):
            return BundleError(
                f"{self.path}: wanted a bundle file, found none of that name; "
                "check the path (relative ones start at the working folder)"
            )
        if isinstance(error, PermissionError):
            return BundleError(
                f"{self.path}: wanted a bundle file that this user may read, found no permission; "
                "change the file's or its folder's mode"
            )
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return BundleError(f"{self.path!r}: wanted a bundle file, found: {words}; check the path")

    def read(self, offset: int, size: int, entry: str) -> bytes:
        """Exactly `size` bytes of the named entry."""
        if self._handle < 0:
            raise ValueError(f"{self.path}: the bundle is closed; open it again")
        parts = []
        while size > 0:
            try:
                part = os.pread(self._handle, min(size, 1 << 30), offset)
            except OSError as error:
                raise self.damage(entry, f"wanted to read it, found: {error.strerror}") from error
            if not part:
                raise self.damage(entry, f"wanted {size} more bytes at offset {offset}, found the file's end")
            parts.append(part)
            offset += len(part)
            size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def damage(self, entry: str, what: str) -> BundleError:
        """The error for an entry that is not what it must be."""
        return BundleError(
            f"{self.path}: entry {entry}: {what}; the file is damaged, fetch or build it again"
        )

    def foreign(self, what: str) -> BundleError:
        """The error for a file that no kvbuild wrote."""
        return BundleError(
            f"{self.path}: wanted a kvbuild bundle, found {what}; name a file that kvbuild wrote"
        )

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def _read(source: _Source) -> Bundle:
    text = _read_manifest(source)
    comment = _end_comment(source)
    digest = hashlib.sha256(text).hexdigest()
    # The digest in the archive's comment is the stronger check, but a cut file has no comment: then the
    # manifest is read all the same, for only its sizes can tell what is missing.
    if comment is not None and comment != digest.encode():
        raise source.damage(
            MANIFEST_NAME, f"wanted sha256 {_ascii(comment)} (the archive's comment), found {digest}"
        )
    try:
        manifest = Manifest.from_bytes(text)
    except BundleError as error:
        raise BundleError(f"{source.path}: {error}") from None
    try:
        where = archive.layout(len(text), manifest.blobs)
    except ValueError as error:
        raise BundleError(f"{source.path}: {error}; build fewer targets into one bundle") from None
    crcs = _check_structure(source, where, text, digest)
    return Bundle(source, manifest, text, where, crcs)


def _read_manifest(source: _Source) -> bytes:
    if source.size == 0:
        raise source.foreign("an empty file")
    magic = source.read(0, min(4, source.size), MANIFEST_NAME)
    if not archive.LOCAL_MAGIC.startswith(magic):
        kinds = [kind for start, kind in _FOREIGN if magic.startswith(start)]
        raise source.foreign(kinds[0] if kinds else f"a file that starts with the bytes {magic.hex()}")
    fixed = source.read(0, archive.LOCAL_SIZE, MANIFEST_NAME)
    size, name_size = struct.unpack_from("<L", fixed, 22)[0], struct.unpack_from("<H", fixed, 26)[0]
    name = source.read(archive.LOCAL_SIZE, name_size, MANIFEST_NAME) if name_size else b""
    if name != MANIFEST_NAME.encode():
        raise source.foreign(f"a zip whose first entry is {_ascii(name)!r}, not {MANIFEST_NAME}")
    entry = archive.Entry(MANIFEST_NAME, size, 0)
    _compare(source, entry.name, archive.header(entry, archive.stored_crc(fixed)), fixed + name)
    if size > MAX_MANIFEST_SIZE:
        raise source.damage(entry.name, f"wanted at most {MAX_MANIFEST_SIZE} bytes, found {size}")
    text = source.read(entry.start, size, entry.name)
    if zlib.crc32(text) != archive.stored_crc(fixed):
        crcs = f"wanted CRC {archive.stored_crc(fixed):08x}, found {zlib.crc32(text):08x}"
        raise source.damage(entry.name, crcs)
    return text


def _end_comment(source: _Source) -> bytes | None:
    size = archive.END_SIZE + archive.COMMENT_SIZE
    if source.size < size:
        return None
    end = source.read(source.size - size, size, "end record")
    if not end.startswith(archive.END_MAGIC) or end[20:22] != struct.pack("<H", archive.COMMENT_SIZE):
        return None
    return end[archive.END_SIZE :]


def _check_structure(source: _Source, where: archive.Layout, text: bytes, digest: str) -> list[int]:
    """Compares all bytes between and after the entries' contents; returns the entries' CRCs."""
    crcs = []
    for entry in where.entries:
        if entry.end > source.size:
            missing = f"wanted a file of {where.total} bytes, found {source.size}: it was cut"
            raise source.damage(entry.name, missing)
        found = source.read(entry.header, entry.start - entry.header, entry.name)
        crc = archive.stored_crc(found)
        _compare(source, entry.name, archive.header(entry, crc), found)
        crcs.append(crc)
    if source.size != where.total:
        what = "it was cut" if source.size < where.total else "there is data after the archive's end"
        raise source.damage(
            "central directory", f"wanted a file of {where.total} bytes, found {source.size}: {what}"
        )
    wanted = archive.trailer(where, crcs, digest)
    _compare_trailer(source, where, wanted, source.read(where.directory, len(wanted), "central directory"))
    return crcs


def _compare_trailer(source: _Source, where: archive.Layout, wanted: bytes, found: bytes) -> None:
    if wanted == found:
        return
    offset = 0
    for entry in where.entries:
        end = offset + archive.CENTRAL_SIZE + len(entry.name)
        _compare(
            source,
            f"{entry.name} (its record in the central directory)",
            wanted[offset:end],
            found[offset:end],
        )
        offset = end
    _compare(source, "end record", wanted[offset:], found[offset:])


def _compare(source: _Source, entry: str, wanted: bytes, found: bytes) -> None:
    if wanted == found:
        return
    at = next(index for index, (one, other) in enumerate(zip(wanted, found, strict=True)) if one != other)
    meaning = _header_fields(found)
    what = f"wanted {wanted[at : at + 4].hex()} at byte {at} of its header, found {found[at : at + 4].hex()}"
    raise source.damage(entry, f"{what}{meaning}")


def _header_fields(found: bytes) -> str:
    """Says in words what a zip tool may have changed, for headers that are still headers."""
    if not found.startswith(archive.LOCAL_MAGIC) or len(found) < archive.LOCAL_SIZE:
        return ""
    flags, method = struct.unpack_from("<2H", found, 6)
    if flags & 1:
        return " (an encrypted entry; bundles hold none)"
    if method:
        return f" (a compressed entry, method {method}; bundles store their entries)"
    return ""


def _ascii(data: bytes) -> str:
    return data.decode("ascii", "backslashreplace")
