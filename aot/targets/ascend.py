"""Ascend 910B: Triton's Ascend fork and bishengir, as far as memory-planned HIVM; the rest is hivmc's.

`kvbuild finish` runs that on a host with CANN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...kernels.ascend import pipeline
from ...kernels.contract import COMPRESS_RATIOS
from ...kernels.gpgpu.route import KernelForm
from ..installed import Package, Recipe
from . import MAX_OUTPUTS, Parameter, Tool

ROUTE = "staged"
ARCHS = tuple(pipeline.VECTOR_CORES)
CHIPS: Mapping[str, tuple[str, ...]] = {arch: (f"Ascend {arch}",) for arch in ARCHS}
ALIASES = ("huawei", "npu", "cann")
TOOLS = ("triton", "triton-adapter-opt", "bishengir-compile")
_BISHENGIR = "{triton}/../ascendnpuir/bin/bishengir-compile"
LOOKUP: Mapping[str, Tool] = {
    # Its own version is LLVM's alone; there is one for each release of the fork.
    "triton-adapter-opt": Tool(("{triton}/backends/ascend/triton-adapter-opt",), ()),
    "bishengir-compile": Tool((_BISHENGIR,), pattern=r"bishengir-compile (\d+(?:\.\d+)+)"),
}
SDK = "triton-ascend 3.2.0 and ascendnpu-ir 1.2.0"
BINARY = "npubin"
SCRATCH = True

RECIPE = Recipe(
    python=(3, 11),
    packages=(
        Package("triton-ascend", "3.2.0", (
            "17c8d7161eed1e96a286281963fe04d3113ee85affaa5d82c7dd0c35803962f0",
            "69a9aecd6fa8b0beb798d16989bb24bc8a1ad61ded71526d6099d4179c428043",
        )),
        Package("ascendnpu-ir", "1.2.0", (
            "d4e5bfab877ee4ba7b312885f4f5bf646072fd47c88d5aa96f6a11f67d3e8522",
            "76aaaedd3c4a08148a690f1bdddf2e2668f484989ab261fdb7e19cdba5d0f957",
        )),
        Package("numpy", "2.4.6", (
            "89cd468399cfd2504718f0ba50e410dca55a170b61a02ad92bb18c8a65186e93",
            "0ab0a9c4ffb1a6d95ef519fe4247dba8eb6b18ad93999f76b7f657039acabd47",
        )),
        Package("pybind11", "3.1.0", (
            "b8488090f8acffbcb6b5d6a85571a6827a0a2981ffb75e5a0b27b87c4a6b7dd0",
        )),
    ),
    size="about 230 MB",
    key_files=(
        "triton/__init__.py",
        "triton/_C/libtriton.so",
        "triton/backends/ascend/compiler.py",
        "triton/backends/ascend/triton-adapter-opt",
        "ascendnpuir/bin/bishengir-compile",
    ),
)  # fmt: skip

# Of one call at most; more only where the driver's memory is larger than any known chip's.
_MOST_CHUNK_BYTES = 1 << 36
DEFAULT_CHUNK_BYTES = 256 << 20


@dataclass(frozen=True)
class RouteRow:
    """One row of build.yaml's routes: which route serves calls of up to max_outputs outputs (None: any), with
    how many dimensions a program."""

    route: str
    max_outputs: int | None
    block_d: int


# Nothing here is measured. Few outputs: the fewest launches. Many: the route whose gather is CANN's own.
DEFAULT_ROUTES = (
    RouteRow("block", 32, 512),
    RouteRow("index_select", None, 512),
    RouteRow("block", None, 512),
)


def _chunk_bytes(value: Any) -> int:
    found: int = value.integer()
    least = max(
        pipeline.least_chunk_bytes(route, ratio)
        for route in pipeline.ROUTES
        for ratio in COMPRESS_RATIOS
    )
    if not least <= found <= _MOST_CHUNK_BYTES:
        value.fail(f"wanted bytes from {least} (one output of the largest ratio) to {_MOST_CHUNK_BYTES}, "
                   f"found {found}")  # fmt: skip
    return found


def _at_most(row: RouteRow) -> int:
    return row.max_outputs or MAX_OUTPUTS


def _routes(value: Any) -> tuple[RouteRow, ...]:
    rows: list[RouteRow] = []
    for entry in value.list():
        keys = entry.record(("route",), ("max_outputs", "block_d"))
        route = keys["route"].text()
        if route not in pipeline.ROUTES:
            keys["route"].fail(f"wanted {' or '.join(pipeline.ROUTES)}, found {route!r}")
        limit = keys["max_outputs"].integer() if "max_outputs" in keys else None
        if limit is not None and not 1 <= limit <= MAX_OUTPUTS:
            keys["max_outputs"].fail(f"wanted at least 1 and at most {MAX_OUTPUTS}, found {limit}")
        block_d = keys["block_d"].integer() if "block_d" in keys else pipeline.BLOCK_DIMS[0]
        if block_d not in pipeline.BLOCK_DIMS:
            wanted = ", ".join(map(str, pipeline.BLOCK_DIMS))
            keys["block_d"].fail(f"wanted one of {wanted}, found {block_d}")
        for at, earlier in enumerate(rows):
            # `block` takes every call up to its limit, another route those that any row of its own would.
            if earlier.route in ("block", route) and _at_most(earlier) >= (limit or MAX_OUTPUTS):
                entry.fail(f"wanted an entry that some call reaches, found that routes[{at}] takes them all")
        rows.append(RouteRow(route, limit, block_d))
    if rows[-1].route != "block" or rows[-1].max_outputs is not None:
        value.fail("wanted `block` without max_outputs as the last entry, for it alone serves every call")
    return tuple(rows)


SECTION_KEYS: Mapping[str, Callable[[Any], object]] = {"chunk_bytes": _chunk_bytes, "routes": _routes}


def needs(arch: str) -> tuple[str, ...]:
    return TOOLS


def triton_target(arch: str) -> tuple[str, int | str, int]:
    return ("npu", f"Ascend{arch}", warp_size(arch))


def warp_size(arch: str) -> int:
    return 0


def elf_machine(arch: str) -> int:
    # Of HIVM, which is text, there is none; `finish` writes down that of the objects it makes.
    return 0


def device_code(binary: bytes, arch: str) -> bytes:
    return binary


def forms(arch: str) -> tuple[str, ...]:
    return ()


def shared_memory(arch: str) -> int:
    return pipeline.UB_BYTES


def options(form: KernelForm) -> Mapping[str, int | bool | str]:
    return stage_options()


def stage_options() -> Mapping[str, int | bool | str]:
    """Triton's options for every stage."""
    return {
        "multibuffer": True,
        "enable_auto_bind_sub_block": True,
        "enable_fp_fusion": False,
        "sanitize_overflow": False,
        "debug": False,
    }


def environment(arch: str) -> Mapping[str, str]:
    return {"KVBUILD_BISHENGIR": _BISHENGIR}


def numerics() -> Mapping[str, object]:
    return {"fp_fusion": False, "denormals": "as bishengir and hivmc set them"}


def toolchain(arch: str, versions: Mapping[str, str]) -> Mapping[str, str]:
    found = {tool: versions[tool] for tool in ("triton", "bishengir-compile")}
    return {**found, "evidence": "linalg run on a host; bishengir's HIVM, hivmc and the chip never"}


def min_driver(toolchain: Mapping[str, str]) -> int:
    return 0


def parameters(binary: bytes, entry: str) -> tuple[Parameter, ...] | None:
    return None


def resources(binary: bytes, entry: str) -> Mapping[str, int]:
    raise ValueError("the manifest has ub_bytes for every stage")
