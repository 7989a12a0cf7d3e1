"""One module per vendor, found by its file name; each has the functions that `Vendor` lists.

A vendor's quirks live in its own file and nowhere else: nothing is registered, a new file is a new vendor.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ...kernels.gpgpu.route import KernelForm


@dataclass(frozen=True)
class Parameter:
    """Where one kernel parameter lies in the parameter space, in bytes, as the binary says."""

    offset: int
    size: int


@dataclass(frozen=True)
class Limits:
    """What the tiles of one arch must keep to.

    forms: the forms of kernel (route.Tile.form) it runs. max_warps: warps that a thread block may have.
    scratch: whether its launchers can take scratch memory, which tiles with a second launch need.
    """

    forms: tuple[str, ...]
    max_warps: int
    scratch: bool


@dataclass(frozen=True)
class Tool:
    """Where a tool beside Triton is looked for in the environment that compiles, and how it is asked.

    paths: tried in order. `{triton}` stands for Triton's folder, `$NAME` for a variable of that environment
    (where it is not set, the path is passed over); a name without a slash is looked for on PATH.
    arguments: what makes it print its version; empty: it need only be there, and its version is `present`.
    pattern: a regular expression whose first group, found first in what it prints, is the version.
    """

    paths: tuple[str, ...]
    arguments: tuple[str, ...] = ("--version",)
    pattern: str = r"(\d+(?:\.\d+)+)"


class Vendor(Protocol):
    """What a vendor's module has.

    ROUTE: `gpgpu` or `cpu`. ARCHS: every arch that it can build. CHIPS: names of products that have an arch,
    the best known first, where they are known; ALIASES: other names that people give the vendor. TOOLS: the
    names whose versions a build depends on. LOOKUP: those that are neither Triton nor zig (and others worth
    knowing the version of), and where they are. SDK: what to install where one is missing, as the object of
    `install`; "" where the extra `compile` brings them all. BINARY: Triton's name of the last stage ("" on
    the cpu route). SECTION_KEYS: the vendor's own keys in build.yaml, each with its reader. SCRATCH: whether
    its driver is known to allocate in a stream's order, which is where a launcher takes scratch from.
    """

    ROUTE: str
    ARCHS: tuple[str, ...]
    CHIPS: Mapping[str, tuple[str, ...]]
    ALIASES: tuple[str, ...]
    TOOLS: tuple[str, ...]
    LOOKUP: Mapping[str, Tool]
    SDK: str
    BINARY: str
    SECTION_KEYS: Mapping[str, Callable[[Any], object]]
    SCRATCH: bool

    def needs(self, arch: str) -> tuple[str, ...]:
        """Those of TOOLS without which this arch cannot be built."""

    def triton_target(self, arch: str) -> tuple[str, int | str, int]:
        """(backend, arch, warp size) as Triton's GPUTarget takes them."""

    def warp_size(self, arch: str) -> int:
        """Threads of a warp; 0 on the cpu route."""

    def elf_machine(self, arch: str) -> int:
        """e_machine of the device binaries (cpu: of the launcher); 0 where no public source tells it."""

    def device_code(self, binary: bytes, arch: str) -> bytes:
        """The ELF file that a launcher hands to the driver: the compiler's result, or where that is a
        container the arch's own member of it. ValueError where there is none."""

    def forms(self, arch: str) -> tuple[str, ...]:
        """Which forms of kernel (route.Tile.form) the arch can run."""

    def shared_memory(self, arch: str) -> int:
        """Bytes of shared memory that one thread block may have; 0 on the cpu route."""

    def options(self, form: KernelForm) -> Mapping[str, int | bool | str]:
        """Triton's options for one kernel, each flag that changes numbers or bytes among them."""

    def environment(self, arch: str) -> Mapping[str, str]:
        """Environment variables of the compilation; `{triton}` stands for Triton's own folder."""

    def numerics(self) -> Mapping[str, object]:
        """The numeric flags as the manifest records them."""

    def toolchain(self, arch: str, versions: Mapping[str, str]) -> Mapping[str, str]:
        """Those of the found versions that this arch's binaries come from, by tool; under `evidence`, in
        words, what is not known of the result."""

    def min_driver(self, toolchain: Mapping[str, str]) -> int:
        """The oldest driver that loads the result, as the driver counts; 0 where there is no such rule."""

    def parameters(self, binary: bytes, entry: str) -> tuple[Parameter, ...] | None:
        """The kernel's parameters, hidden ones included, read from the binary. ValueError if it cannot be.

        None where the format of such binaries is not public: then they are derived (assemble.check).
        """

    def resources(self, binary: bytes, entry: str) -> Mapping[str, int]:
        """Registers and spill bytes of the kernel, for the report. ValueError if it cannot be read."""


@functools.cache
def names() -> tuple[str, ...]:
    """Every vendor, in alphabetical order."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


def load(vendor: str) -> Vendor:
    """The module of a vendor that `names` lists."""
    return cast(Vendor, importlib.import_module(f"{__name__}.{vendor}"))


# Threads of a thread block at most, on every chip there is a target for.
MAX_THREADS = 1024

# Of a row's max_outputs; more than memory holds, and what launch tables count in has room to spare.
MAX_OUTPUTS = 2**31 - 1


def limits(vendor: str, arch: str) -> Limits:
    """What tiles of vendor:arch must keep to."""
    module = load(vendor)
    warp = module.warp_size(arch)
    return Limits(module.forms(arch), MAX_THREADS // warp if warp else 0, module.SCRATCH)


def hidden_pointers(triton: str) -> int:
    """How many pointers a Triton of that version adds behind a kernel's own parameters.

    3.3 began to pass a global scratch, 3.5 a profile scratch too. A fork bears the number of the Triton it is
    made from. ValueError for a text that begins with no version.
    """
    match = re.match(r"(\d+)\.(\d+)", triton)
    if match is None:
        raise ValueError(f"wanted a Triton version such as 3.6.0, found {triton!r}")
    version = int(match[1]), int(match[2])
    return 0 if version < (3, 3) else 1 if version < (3, 5) else 2
