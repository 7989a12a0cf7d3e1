"""The host kernel's C sources and the flags they are compiled with; read by the builder and the tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

# The same files for every architecture: what one lacks is guarded inside.
SOURCES: tuple[str, ...] = (
    "compress.c",
    "fold_avx2.c",
    "fold_avx512.c",
    "fold_baseline.c",
    "pool.c",
    "settings.c",
    "store.c",
    "window.c",
)
HEADERS: tuple[str, ...] = ("compress.h", "fold.h", "pool.h")

# No contraction of a multiply and an add, or the levels would differ in bytes.
_FLAGS = (
    "-std=gnu11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-pthread",
)  # fmt: skip
FLAGS: Mapping[str, tuple[str, ...]] = {"x86_64": _FLAGS, "aarch64": _FLAGS}
