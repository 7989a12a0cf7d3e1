"""The matrix of Triton versions judges rightly. `make test-triton` runs it; here nothing is downloaded."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbuild.aot import assemble, targets, toolchain
from kvbuild.aot.pool import Compiled, Failed
from kvbuild.kernels.contract import COMPRESS_RATIOS

sys.path.insert(0, str(Path(__file__).parent))
import environments
import matrix

TRITON = toolchain.Toolchain("nvidia", (sys.executable,), {"triton": "3.9.0", "ptxas": "12.9.86"}, ())


def test_every_kernel_layout_ratio_and_arch_is_planned() -> None:
    units = matrix.plan_for(TRITON, matrix.TILES).units
    assert {unit.function for unit in units} == {"compress_fused", "compress_scan", "compress_finalize"}
    for function in {unit.function for unit in units}:
        own = [unit for unit in units if unit.function == function]
        assert {dict(unit.constexprs)["RATIO"] for unit in own} == set(COMPRESS_RATIOS)
        assert {dict(unit.constexprs)["BLOCK_SIZE"] for unit in own} == {0, 8}
        assert {unit.arch for unit in own} == set(matrix.ARCHS)
        splits = {dict(unit.constexprs).get("SPLIT") for unit in own}
        assert function == "compress_fused" or splits == {1, 2, 8}


def test_the_tiles_of_every_vendor_with_a_triton_of_its_own_are_among_them() -> None:
    from kvbuild.aot import tuning

    chosen = matrix.tiles()
    for vendor in ("hygon", "metax", "tianshu", "mthreads", "thead"):
        for arch in targets.load(vendor).ARCHS:
            for rows in tuning.load(vendor, arch).rows.values():
                assert {row.tile for row in rows} <= set(chosen)


def test_the_facts_are_what_the_builder_derives() -> None:
    for version in environments.VERSIONS:
        assert matrix.expected_hidden(version) == targets.hidden_pointers(version)
    with pytest.raises(KeyError):
        matrix.expected_hidden("2.1.0")


def test_a_unit_is_right_only_with_the_expected_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = matrix.plan_for(TRITON, matrix.TILES).units[0]
    compiled = Compiled(unit, b"", {}, 0.0)
    monkeypatch.setattr(assemble, "check", lambda _: SimpleNamespace(hidden=1))
    assert matrix.judge(compiled, 1).error == ""
    assert "wanted 2 hidden pointers, found 1" in matrix.judge(compiled, 2).error

    def refuse(_: Any) -> None:
        raise ValueError("state_cache: wanted 8 bytes at offset 0, found 4 at 0")

    monkeypatch.setattr(assemble, "check", refuse)
    assert "found 4 at 0" in matrix.judge(compiled, 1).error
    assert "no such op" in matrix.judge(Failed(unit, "no such op", 0.0), 1).error


@pytest.mark.parametrize(
    ("outcome", "code", "words"),
    [
        (matrix.Outcome("f", 2, ""), 0, "1 of    1      2"),
        (matrix.Outcome("f", 1, "sm_80 f: wanted 2"), 1, "0 of    1      1"),
        (environments.InstallError("no such version"), 1, "0 of    1      -"),
        (None, 1, "0 of    1      -"),
    ],
)
def test_one_wrong_kernel_or_version_fails_the_whole(
    outcome: Any, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compiled(*_: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return [] if outcome is None else [outcome]

    monkeypatch.setattr(matrix, "compiled", compiled)
    assert matrix.main(["3.6.0"]) == code
    printed = capsys.readouterr()
    assert words in printed.out
    assert ("FAILED" in printed.out) is (code == 1)
    if code:
        assert printed.err.startswith("triton 3.6.0: ")


def test_an_unknown_version_is_a_wrong_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["2.1.0"]) == 2
    assert "found 2.1.0" in capsys.readouterr().err


def test_a_version_that_cannot_be_installed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, ...]] = []

    def run(*command: str) -> None:
        made.append(command)
        if "pip" in command:
            raise environments.InstallError("no matching distribution")
        Path(command[-1]).mkdir()

    monkeypatch.setattr(environments, "run", run)
    with pytest.raises(environments.InstallError, match="no matching"):
        environments.environment("3.1.0", tmp_path / "tritons")
    assert list((tmp_path / "tritons").iterdir()) == []
    assert made[-1][-2:] == ("triton==3.1.0", "setuptools")


def test_an_environment_is_used_only_where_it_has_that_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, str | None] = {}
    monkeypatch.setattr(environments, "found_by", lambda python: found.get(str(python)))

    def run(*command: str) -> None:
        if "venv" in command:
            Path(command[-1]).mkdir()

    monkeypatch.setattr(environments, "run", run)
    with pytest.raises(environments.InstallError, match=r"wanted triton 3.2.0 in .*, found none"):
        environments.environment("3.2.0", tmp_path)
    (place,) = tmp_path.iterdir()
    found[str(place / "bin" / "python")] = "3.2.0"
    assert environments.environment("3.2.0", tmp_path) == place / "bin" / "python"
    found[sys.executable] = "3.9.0"
    assert environments.environment("3.9.0", tmp_path) == Path(sys.executable)


def test_a_real_failure_of_the_installer_is_shown() -> None:
    with pytest.raises(environments.InstallError, match="last words"):
        environments.run(sys.executable, "-c", "import sys; sys.exit('last words')")
    with pytest.raises(environments.InstallError):
        environments.run("/no/such/python")
