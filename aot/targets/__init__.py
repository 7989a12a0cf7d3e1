"""One module per vendor, found by its file name; each has the functions that `Vendor` lists.

A vendor's quirks live in its own file and nowhere else: nothing is registered, a new file is a new vendor.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ...kernels.gpgpu.route import KernelForm


@dataclass(frozen=True)
class Parameter:
    """Where one kernel parameter lies in the parameter space, in bytes, as the binary says."""

    offset: int
    size: int


class Vendor(Protocol):
    """What a vendor's module has.

    ROUTE: `gpgpu` or `cpu`. ARCHS: every arch that it can build. TOOLS: the names whose versions a build
    depends on. BINARY: Triton's name of the last stage ("" on the cpu route). SECTION_KEYS: the vendor's own
    keys in build.yaml, each with its reader.
    """

    ROUTE: str
    ARCHS: tuple[str, ...]
    TOOLS: tuple[str, ...]
    BINARY: str
    SECTION_KEYS: Mapping[str, Callable[[Any], object]]

    def triton_target(self, arch: str) -> tuple[str, int | str, int]:
        """(backend, arch, warp size) as Triton's GPUTarget takes them."""

    def warp_size(self, arch: str) -> int:
        """Threads of a warp; 0 on the cpu route."""

    def elf_machine(self, arch: str) -> int:
        """e_machine of the device binaries (cpu: of the launcher)."""

    def forms(self, arch: str) -> tuple[str, ...]:
        """Which forms of kernel (route.Tile.form) the arch can run."""

    def shared_memory(self, arch: str) -> int:
        """Bytes of shared memory that one thread block may have; 0 on the cpu route."""

    def options(self, form: KernelForm) -> Mapping[str, int | bool]:
        """Triton's options for one kernel, each flag that changes numbers or bytes among them."""

    def environment(self, arch: str) -> Mapping[str, str]:
        """Environment variables of the compilation; `{triton}` stands for Triton's own folder."""

    def numerics(self) -> Mapping[str, object]:
        """The numeric flags as the manifest records them."""

    def toolchain(self, arch: str, versions: Mapping[str, str]) -> Mapping[str, str]:
        """Those of the found versions that this arch's binaries come from, by tool."""

    def min_driver(self, toolchain: Mapping[str, str]) -> int:
        """The oldest driver that loads the result, as the driver counts; 0 where there is no such rule."""

    def parameters(self, binary: bytes, entry: str) -> tuple[Parameter, ...]:
        """The kernel's parameters, hidden ones included, read from the binary. ValueError if it cannot be."""

    def resources(self, binary: bytes, entry: str) -> Mapping[str, int]:
        """Registers and spill bytes of the kernel, for the report. ValueError if it cannot be read."""


@functools.cache
def names() -> tuple[str, ...]:
    """Every vendor, in alphabetical order."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


def load(vendor: str) -> Vendor:
    """The module of a vendor that `names` lists."""
    return cast(Vendor, importlib.import_module(f"{__name__}.{vendor}"))
