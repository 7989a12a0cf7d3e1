"""Writes bundles: a manifest and its blobs become one file, and several files become one.

The bytes depend on the manifest and the blobs alone (kvbuild.runtime.archive). A file appears under its
name whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ..runtime import archive
from ..runtime.bundle import MAX_MANIFEST_SIZE, Bundle, open_bundle
from ..runtime.manifest import Manifest, Target
from .errors import RequestError
from .publish import publish


def write(path: str | os.PathLike[str], manifest: Manifest, blobs: Mapping[str, bytes]) -> None:
    """Writes the bundle, replacing whatever file `path` names.

    manifest: what goes in first; it is read back strictly before anything is written (BundleError).
    blobs:    the content of every blob the manifest lists, by sha256; further ones are left out.

    RequestError where `path` cannot be written or the bundle would exceed 4 GiB, BuildError where the disk is
    full or fails, ValueError where a blob is missing or is not what its name says. On any failure, an
    interrupt included, nothing is left behind and a file that was there before is as it was.
    """
    checked = Manifest.from_json(manifest.to_json())
    for name, size in checked.blobs.items():
        if name not in blobs:
            raise ValueError(f"blob {name}: wanted {size} bytes, found none")
        found = hashlib.sha256(blobs[name]).hexdigest()
        if found != name or len(blobs[name]) != size:
            raise ValueError(
                f"blob {name}: wanted {size} bytes of that sha256, found {len(blobs[name])} of {found}"
            )
    text = checked.canonical_bytes()
    if len(text) > MAX_MANIFEST_SIZE:
        raise RequestError(
            f"{path}: wanted a manifest of at most {MAX_MANIFEST_SIZE} bytes, found {len(text)}; "
            "build fewer targets into one bundle"
        )
    try:
        where = archive.layout(len(text), checked.blobs)
    except ValueError as error:
        raise RequestError(f"{path}: {error}; build fewer targets into one bundle") from None
    publish(Path(path), "bundle", _chunks(where, text, blobs))


def merge(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Manifest:
    """Writes the union of the bundles' targets to `out` and returns its manifest.

    A target that several bundles hold with equal content is taken once. RequestError where they differ,
    naming both files, or where `out` cannot be written; BundleError where an input is damaged or of another
    schema.
    """
    if not paths:
        raise RequestError("merge: wanted one bundle or more, found none; name the files to merge")
    targets: dict[tuple[str, str], Target] = {}
    origin: dict[tuple[str, str], str] = {}
    sizes: dict[str, int] = {}
    blobs: dict[str, bytes] = {}
    versions: set[str] = set()
    for path in paths:
        with open_bundle(path) as bundle:
            versions.add(bundle.manifest.kvbuild)
            _collect(bundle, os.fspath(path), targets, origin)
            for name, size in bundle.manifest.blobs.items():
                sizes[name] = size
                blobs[name] = bundle.read(name)
    merged = Manifest(
        kvbuild=_newest(versions),
        targets=tuple(targets[key] for key in sorted(targets)),
        blobs=sizes,
    )
    write(out, merged, blobs)
    return merged


def _collect(
    bundle: Bundle,
    path: str,
    targets: dict[tuple[str, str], Target],
    origin: dict[tuple[str, str], str],
) -> None:
    for target in bundle.manifest.targets:
        key = (target.vendor, target.arch)
        if key in targets and targets[key] != target:
            raise RequestError(
                f"{target.name}: wanted the same content in every bundle, found {origin[key]} and {path} to "
                f"differ in {', '.join(_differences(targets[key], target))}; leave one of them out"
            )
        targets.setdefault(key, target)
        origin.setdefault(key, path)


def _differences(one: Target, other: Target) -> list[str]:
    left, right = one.to_json(), other.to_json()
    return [name for name in left if left[name] != right[name]]


def _newest(versions: Iterable[str]) -> str:
    return max(
        versions,
        key=lambda text: [
            (part.isdigit(), int(part) if part.isdigit() else 0, part) for part in text.split(".")
        ],
    )


def _chunks(where: archive.Layout, text: bytes, blobs: Mapping[str, bytes]) -> Iterator[bytes]:
    crcs = []
    for entry in where.entries:
        content = text if entry.header == 0 else blobs[entry.name]
        crcs.append(zlib.crc32(content))
        yield archive.header(entry, crcs[-1])
        yield content
    yield archive.trailer(where, crcs, hashlib.sha256(text).hexdigest())
