"""Which shared libraries the dynamic linker would find on this host, without loading one or starting a
process: to load a foreign vendor's driver only to see whether it is there could start it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

LINKER_CACHE = Path("/etc/ld.so.cache")
_RTLD_NOLOAD = 4


def present(names: Iterable[str]) -> tuple[str, ...]:
    """Those of `names` that are loaded already, lie in a folder of LD_LIBRARY_PATH or stand in the linker's
    cache, in the order given."""
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    try:
        cache = LINKER_CACHE.read_bytes()
    except OSError:
        cache = b""
    return tuple(
        name
        for name in names
        if f"/{name}\0".encode() in cache
        or any(os.path.isfile(os.path.join(folder, name)) for folder in folders)
        or _loaded(name)
    )


def _loaded(name: str) -> bool:
    try:
        ctypes.CDLL(name, mode=os.RTLD_LAZY | _RTLD_NOLOAD)
    except OSError:
        return False
    return True
