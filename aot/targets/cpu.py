"""The host itself: its kernel is C and is compiled into the launcher, so it has no device binaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...kernels.gpgpu.route import KernelForm
from . import Parameter, Tool

ROUTE = "cpu"
ARCHS = ("x86_64", "aarch64")
CHIPS: Mapping[str, tuple[str, ...]] = {}
ALIASES = ("host",)
TOOLS = ("zig",)
LOOKUP: Mapping[str, Tool] = {}
SDK = ""
BINARY = ""
SECTION_KEYS: Mapping[str, Callable[[Any], object]] = {}
SCRATCH = False

_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


def needs(arch: str) -> tuple[str, ...]:
    return TOOLS


def triton_target(arch: str) -> tuple[str, int | str, int]:
    raise ValueError("the cpu route compiles no Triton")


def warp_size(arch: str) -> int:
    return 0


def elf_machine(arch: str) -> int:
    return _ELF_MACHINES[arch]


def device_code(binary: bytes, arch: str) -> bytes:
    return binary


def forms(arch: str) -> tuple[str, ...]:
    return ()


def shared_memory(arch: str) -> int:
    return 0


def options(form: KernelForm) -> Mapping[str, int | bool]:
    return {}


def environment(arch: str) -> Mapping[str, str]:
    return {}


def numerics() -> Mapping[str, object]:
    return {"fp_fusion": False, "denormals": "preserve"}


def toolchain(arch: str, versions: Mapping[str, str]) -> Mapping[str, str]:
    return {}


def min_driver(toolchain: Mapping[str, str]) -> int:
    return 0


def parameters(binary: bytes, entry: str) -> tuple[Parameter, ...]:
    return ()


def resources(binary: bytes, entry: str) -> Mapping[str, int]:
    return {}
