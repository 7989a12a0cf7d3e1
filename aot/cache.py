"""Content-addressed store of finished work, which several builders may share, also on a network file system.

An entry is one file named by its key and appears whole, by rename; there are no locks to wait for or to
leave behind. Its first line is the sha256 of the rest, which every read verifies.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BuildError, RequestError

_FORMAT = "1"


@dataclass(frozen=True)
class Entry:
    """What a key stands for: a binary and the facts that came with it."""

    data: bytes
    facts: Mapping[str, Any]


def default_folder(environ: Mapping[str, str]) -> Path:
    """KVBUILD_CACHE, else the platform's cache folder. RequestError where none is known."""
    if environ.get("KVBUILD_CACHE"):
        return Path(environ["KVBUILD_CACHE"])
    # The XDG rule: a relative XDG_CACHE_HOME counts as unset.
    if os.path.isabs(environ.get("XDG_CACHE_HOME", "")):
        return Path(environ["XDG_CACHE_HOME"], "kvbuild")
    if environ.get("HOME"):
        return Path(environ["HOME"], ".cache", "kvbuild")
    raise RequestError("no folder for finished units: HOME is not set; set KVBUILD_CACHE to a folder")


class Cache:
    """The store under one folder. note: told of each damaged entry that was passed over."""

    def __init__(self, folder: Path, note: Callable[[str], None] = lambda text: None) -> None:
        self.folder = folder / _FORMAT
        self.note = note
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            kind = BuildError if _is_full(error) else RequestError
            raise kind(
                f"{folder}: wanted a folder for finished units that can be written, found: "
                f"{error.strerror}; set KVBUILD_CACHE to another folder"
            ) from None

    def get(self, key: str) -> Entry | None:
        """The entry of a key; None where there is none, or a damaged one (which the next put replaces)."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.note(f"cache: {path} cannot be read ({error.strerror}); it is made anew")
            return None
        digest, _, rest = content.partition(b"\n")
        if hashlib.sha256(rest).hexdigest().encode() != digest:
            self.note(f"cache: {path} is damaged; it is made anew")
            return None
        head, _, data = rest.partition(b"\n")
        try:
            facts = dict(json.loads(head))
        except (ValueError, TypeError, RecursionError):
            facts = {}
        if facts.pop("key", None) != key:
            self.note(f"cache: {path} belongs to another key; it is made anew")
            return None
        return Entry(data, facts)

    def put(self, key: str, entry: Entry) -> None:
        """Stores an entry, replacing one that is there. BuildError where the disk refuses."""
        path = self._path(key)
        head = json.dumps({**entry.facts, "key": key}, sort_keys=True).encode()
        rest = head + b"\n" + entry.data
        # Named before it is made, so that an interrupt at any moment knows what to remove.
        temporary = path.parent / f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            # With its parents: whoever tidies a shared folder may do so during a build.
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "xb") as file:
                file.write(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            raise BuildError(
                f"{path}: cannot be written: {error.strerror}; make room or set KVBUILD_CACHE"
            ) from None
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
