"""Small units and plans, so that the builder's tests need none of the operator's own kernels."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbuild.aot import targets, toolchain
from kvbuild.aot.plan import Plan, PlannedKernel, PlannedTarget, PlannedVariant, Unit
from kvbuild.aot.pool import Compiled, Failed, Pool
from kvbuild.aot.spec import TargetName
from kvbuild.kernels.gpgpu.route import KernelForm, Tile

sys.path.insert(0, str(Path(__file__).parent / "standin"))
import cann as cann_standin
import harness

ADD = """
import triton
import triton.language as tl
from .step import STEP

@triton.jit
def add(x, n, count, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    tl.store(x + i, v * scale + STEP, mask=i < n * count)
"""
STEP = "import triton.language as tl\nSTEP = tl.constexpr(3.0)\n"
SIGNATURE = (("x", "*fp32"), ("n", "i64"), ("count", "i32"), ("scale", "fp32"))
TILE = Tile(4, 512, 1, 4, 1)


class Tiny:
    """Makes units and plans, and keeps the sources they name."""

    def __init__(self) -> None:
        self.sources = {"tiny/add.py": ADD, "tiny/step.py": STEP}
        self.toolchain = toolchain.probe("nvidia", {}, os.environ)

    def unit(self, target: str = "nvidia:sm_80", module: str = "tiny/add.py", **changes: object) -> Unit:
        """A unit of `add`; module: which of `sources` holds it."""
        vendor, _, arch = target.partition(":")
        files = sorted({module, "tiny/step.py"})
        form = KernelForm("add", module, (), (("BLOCK", 64),), 4, 1, 1, 1, 1)
        found = targets.load(vendor)
        unit = Unit(
            vendor=vendor,
            arch=arch,
            triton_target=found.triton_target(arch),
            module=module,
            function="add",
            sources=tuple((path, hashlib.sha256(self.sources[path].encode()).hexdigest()) for path in files),
            signature=SIGNATURE,
            constexprs=form.constexprs,
            divisible_by_16=(),
            options=tuple(sorted(found.options(form).items())),
            environment=tuple(sorted(found.environment(arch).items())),
            binary=found.BINARY,
            toolchain=tuple(sorted(found.toolchain(arch, self.toolchain.versions).items())),
            recipe="0" * 64,
        )
        return replace(unit, **changes)  # type: ignore[arg-type]

    def source(self, name: str, text: str) -> str:
        """Adds a source file and returns its path."""
        self.sources[f"tiny/{name}.py"] = text
        return f"tiny/{name}.py"

    def target(self, name: str, units: Iterable[tuple[int, str, int | None, Unit]]) -> PlannedTarget:
        """A target with one variant, of one kernel, for each (ratio, layout, max_outputs, unit)."""
        vendor, _, arch = name.partition(":")
        kernels, variants = [], []
        for ratio, layout, limit, unit in units:
            form = KernelForm(unit.function, unit.module, (), unit.constexprs, 4, 1, 1, 1, 1)
            kernel = PlannedKernel(f"add-c{ratio}-{layout}-{limit}", ratio, layout, TILE, form, unit)
            kernels.append(kernel)
            variants.append(PlannedVariant(ratio, layout, limit, (kernel.name,), 0))
        tools = {**dict(kernels[0].unit.toolchain), "zig": "1"}
        hosts = ("aarch64-linux-gnu.2.17", "x86_64-linux-gnu.2.17")
        return PlannedTarget(
            TargetName(vendor, arch), tools, "0" * 64, tuple(kernels), tuple(variants), hosts
        )

    def plan(self, *planned: PlannedTarget) -> Plan:
        return Plan(planned, self.sources, dict.fromkeys(targets.names(), (sys.executable,)))

    def compile(self, *units: Unit, jobs: int = 1, limit_s: float = 200.0) -> list[Compiled | Failed]:
        """The outcomes of a pool, in the order of `units`."""
        pool = Pool(self.plan().commands, self.sources, jobs, os.environ, limit_s)
        outcomes = {outcome.unit.key: outcome for outcome in pool.run(units)}
        return [outcomes[unit.key] for unit in units]


@pytest.fixture
def tiny() -> Tiny:
    return Tiny()


@pytest.fixture(scope="session")
def tiny_units() -> Tiny:
    """For fixtures that outlive one test; a test takes `tiny`, which it may change."""
    return Tiny()


@pytest.fixture(scope="session")
def compiled_tiny() -> dict[str, Compiled]:
    """`add` compiled for one arch of each kind of binary, by target."""
    tiny = Tiny()
    names = ("nvidia:sm_80", "nvidia:sm_90", "nvidia:sm_100", "amd:gfx942", "amd:gfx1100")
    outcomes = tiny.compile(*(tiny.unit(name) for name in names))
    for outcome in outcomes:
        assert isinstance(outcome, Compiled), outcome
    return {name: each for name, each in zip(names, outcomes, strict=True) if isinstance(each, Compiled)}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a text to a file and returns its path."""

    def to_file(text: str) -> Path:
        path = tmp_path / "build.yaml"
        path.write_text(text)
        return path

    return to_file


@pytest.fixture
def bench(request: pytest.FixtureRequest, session_folder: Path) -> tuple[harness.Bench, Path]:
    """A launcher and the stand-in driver of the module's VENDOR, nvidia where it names none."""
    return harness.gpu_bench(getattr(request.module, "VENDOR", "nvidia"), session_folder)


@pytest.fixture
def run(bench: tuple[harness.Bench, Path], tmp_path: Path) -> Any:
    """run(scenario, **settings of the driver) -> what the scenario said, and the driver's calls."""

    def scenario(text: str, **settings: str) -> tuple[Any, list[dict[str, Any]]]:
        return bench[0].run(text, tmp_path, bench[1], **settings)

    return scenario


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """A bundle of two Ascend targets that nobody has finished."""
    return cann_standin.write_unfinished(tmp_path / "hivm.kvb")


@pytest.fixture
def cann(tmp_path: Path) -> Path:
    """The folder of a CANN whose hivmc is a stand-in."""
    return cann_standin.install(tmp_path / "cann")
