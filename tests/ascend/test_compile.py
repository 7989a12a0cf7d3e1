"""Ascend's real toolchain: what it compiles, the same every time, and what it says of what does not fit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hosttools
import pytest

from kvbuild.aot import assemble, build, plan, spec, targets, toolchain
from kvbuild.aot.plan import Plan, Unit
from kvbuild.aot.pool import Compiled, Failed, Pool
from kvbuild.aot.spec import TargetName
from kvbuild.kernels.ascend import pipeline

if not os.environ.get(hosttools.WANTED):
    pytest.skip(hosttools.LEFT_OUT, allow_module_level=True)

# Much more than the unified buffer holds: four tiles of 128 KiB.
LARGE = """
import triton
import triton.language as tl

@triton.jit
def scatter_bytes(x, y):
    at = tl.arange(0, 64)[:, None] * 512 + tl.arange(0, 512)[None, :]
    a = tl.load(x + at)
    tl.store(y + at, tl.exp(a) * a + tl.exp(a + 1.0) * tl.exp(a * 2.0))
"""


@pytest.fixture(scope="module")
def planned() -> Plan:
    """The plan of every chip, for the toolchain that is here."""
    environment = hosttools.own_environment()
    found = toolchain.probe("ascend", {}, environment)
    if found.missing:
        pytest.fail(f"wanted the Ascend toolchain, found: {found.missing[0]}; `make test-ascend` installs it")
    names = [TargetName("ascend", arch) for arch in targets.load("ascend").ARCHS]
    facts = plan.Facts(
        {}, {"ascend": found.versions}, {"ascend": found.command}, "0", (), build.read_source, "r"
    )  # fmt: skip
    return plan.plan(spec.load(spec.PACKAGED), names, facts)


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two folders to compile in, one of them with a name that no line of a command may break at."""
    made = tmp_path / "a", tmp_path / "b c"
    for folder in made:
        folder.mkdir()
    yield made
    for folder in made:
        shutil.rmtree(folder)


def compile_in(
    folder: Path, planned: Plan, units: list[Unit], monkeypatch: pytest.MonkeyPatch
) -> list[bytes]:
    """The results of the units, in their order, compiled with `folder` as the place for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    outcomes = Pool(planned.commands, planned.sources, 1, hosttools.own_environment()).run(units)
    made: dict[str, bytes] = {}
    for outcome in outcomes:
        assert isinstance(outcome, Compiled), outcome
        made[outcome.unit.key] = assemble.check(outcome).data
    return [made[unit.key] for unit in units]


def test_equal_bytes_from_two_folders_without_a_path_in_them(
    planned: Plan, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("encode", "locate-c128", "normalise", "scatter")
    units = [stage.unit for stage in planned.targets[1].stages if stage.name in small]
    assert len(units) == len(small)
    first, second = (compile_in(folder, planned, units, monkeypatch) for folder in folders)
    assert first == second
    for data in first:
        assert not any(str(folder).encode() in data for folder in folders)
        assert b"loc(" not in data and b".py" not in data and b"/tmp" not in data


def test_a_chip_gets_its_own_code(
    planned: Plan, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    units = [stage.unit for target in planned.targets for stage in target.stages if stage.name == "scatter"]
    texts = [data.decode() for data in compile_in(folders[0], planned, units, monkeypatch)]
    for target, text in zip(planned.targets, texts, strict=True):
        cores = pipeline.VECTOR_CORES[target.name.arch]
        assert f'dl_entry<"VECTOR_CORE_COUNT", {cores} : i32>' in text
        assert f'dl_entry<"UB_SIZE", {8 * pipeline.UB_BYTES} : i32>' in text


def test_a_stage_that_overflows_says_by_how_much(planned: Plan) -> None:
    scatter = next(stage.unit for stage in planned.targets[0].stages if stage.name == "scatter")
    unit = replace(scatter, signature=(("x", "*fp32"), ("y", "*fp32")))
    sources = {**planned.sources, "ascend/scatter.py": LARGE}
    (outcome,) = Pool(planned.commands, sources, 1, hosttools.own_environment()).run([unit])
    assert isinstance(outcome, Failed)
    assert outcome.error.startswith("RuntimeError: unified buffer: wanted at most 196608 bytes, found ")
    assert "too many; choose a smaller block_d" in outcome.error and "\n" not in outcome.error
