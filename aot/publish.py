"""Files that appear whole: under a temporary name, to the disk, and only then under their own."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from .errors import BuildError, RequestError


def publish(path: Path, what: str, chunks: Iterable[bytes]) -> None:
    """Writes a file that is there whole or not at all. what: the noun that errors use, such as bundle.

    A link stays, and what it leads to is replaced.
    Raises RequestError where nothing can be put there, BuildError where the disk is full or fails.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        kind = "a folder" if os.path.isdir(path) else "something that is not a regular file"
        raise RequestError(f"{path}: wanted a file's name, found {kind}; choose another with -o")
    real = Path(os.path.realpath(path))
    # Named before it is made, so that an interrupt at any moment knows what to remove.
    temporary = real.parent / f".kvb-{os.getpid()}-{secrets.token_hex(8)}.tmp"
    try:
        with open(temporary, "xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, real)
        _sync_folder(real.parent)
    except OSError as error:
        words = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            text = f"{path}: wanted to write the {what}, found: {words}; make room or choose another with -o"
            raise BuildError(text) from error
        text = f"{path}: wanted a place to write the {what}, found: {words}; choose another with -o"
        raise RequestError(text) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
