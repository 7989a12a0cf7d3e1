"""What a folder of installed files holds, file by file, so that whatever is no longer so is seen before it is
used."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHUNK = 1 << 20
# Installers write the interpreter's path into the first lines of programs and into their lists of files.
_HOST_BOUND = re.compile(r"bin/|[^/]*\.dist-info/")


@dataclass(frozen=True)
class File:
    """One file. mode: type and permissions, as lstat has them. sha256: of its content; of a link's, where it
    leads to."""

    size: int
    mode: int
    sha256: str


Tree = Mapping[str, File]


def read(folder: Path, left_out: Iterable[str] = ()) -> dict[str, File]:
    """Every file by its path in the folder, but for those left out and what Python compiles by itself.

    OSError where one cannot be read.
    """
    found: dict[str, os.stat_result] = {}
    for here, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if name != "__pycache__"]
        # A link to a folder is a file here: it is not followed.
        for name in (*files, *(each for each in folders if os.path.islink(os.path.join(here, each)))):
            path = Path(here, name)
            found[path.relative_to(folder).as_posix()] = path.lstat()
    for name in left_out:
        found.pop(name, None)
    # hashlib lets the other threads work meanwhile.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        digests = pool.map(lambda item: _sha256(folder / item[0], item[1].st_mode), found.items())
        return {
            name: File(found[name].st_size, found[name].st_mode, digest)
            for name, digest in zip(found, digests, strict=True)
        }


def _raise(error: OSError) -> None:
    raise error


def _sha256(path: Path, mode: int) -> str:
    digest = hashlib.sha256()
    if stat.S_ISLNK(mode):
        digest.update(os.fsencode(os.readlink(path)))
    elif stat.S_ISREG(mode):
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def difference(wanted: Tree, found: Tree) -> str:
    """What the first file that differs has in place of what is wanted; "" where all are equal."""
    for name in sorted({*wanted, *found}):
        one, other = wanted.get(name), found.get(name)
        if one is None or other is None or one.size != other.size:
            return f"{name}: wanted {_bytes(one)}, found {_bytes(other)}"
        if one.mode != other.mode:
            return f"{name}: wanted the mode {one.mode:o}, found {other.mode:o}"
        if one.sha256 != other.sha256:
            return f"{name}: its content is not what was installed"
    return ""


def _bytes(file: File | None) -> str:
    return "no such file" if file is None else f"{file.size} bytes"


def digest(tree: Tree) -> str:
    """sha256 over the paths and contents that are the same wherever the same packages are installed."""
    same = {
        name: file.sha256
        for name, file in tree.items()
        if not _HOST_BOUND.match(name)
    }
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()


def to_json(tree: Tree) -> dict[str, list[object]]:
    """As JSON values, the inverse of `from_json`."""
    return {name: [file.size, f"{file.mode:o}", file.sha256] for name, file in tree.items()}


def from_json(value: Any) -> dict[str, File]:
    """Reads what `to_json` made. ValueError, TypeError, KeyError or AttributeError for anything else."""
    return {
        str(name): File(int(size), int(mode, 8), str(sha256)) for name, (size, mode, sha256) in value.items()
    }
