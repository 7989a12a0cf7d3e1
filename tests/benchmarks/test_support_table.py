"""The README's support table is what the targets and the recorded runs give, and claims nothing more."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbuild.aot import targets, toolchain

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "support_table.py"


@pytest.fixture(scope="module")
def support() -> Any:
    spec = importlib.util.spec_from_file_location("support_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_readme_has_the_table_of_now(support: Any) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    made = support.table(support.rows(support.recorded()))
    assert made in readme, "run: python benchmarks/support_table.py --write"
    assert support.written(readme, made) == readme


def test_the_chips_of_a_row_are_those_of_its_archs(support: Any) -> None:
    (rows,) = [row for row in support.table(support.rows({})).splitlines() if row.startswith("| metax ")]
    assert rows.startswith("| metax | c500 c600 | C500, C550, C600 | no: it takes ")


def test_every_target_stands_in_it_once(support: Any) -> None:
    listed = [(row.vendor, arch) for row in support.rows({}) for arch in row.archs]
    assert sorted(listed) == sorted((v, arch) for v in targets.names() for arch in targets.load(v).ARCHS)


def test_compiled_means_that_the_packages_of_the_registry_do_it(support: Any) -> None:
    here = {vendor: toolchain.probe(vendor, {}, os.environ).versions for vendor in targets.names()}
    for row in support.rows({}):
        for arch in row.archs:
            if row.compiled.startswith("yes"):
                assert set(targets.load(row.vendor).needs(arch)) <= set(here[row.vendor]), (row.vendor, arch)
            else:
                assert row.compiled.startswith(("no: it takes ", "as far as "))


def test_without_a_recorded_run_nothing_was_loaded_or_computed(support: Any) -> None:
    for row in support.rows({}):
        if row.vendor != "cpu":
            assert (row.loaded, row.computed) == ("a stand-in driver", "no")


def test_a_recorded_run_counts_for_its_own_arch_alone(support: Any, tmp_path: Path) -> None:
    statuses = ["passed", "passed", "failed", "not run"]
    record = {
        "device": {"name": "Chip X", "gpus": 2, "facts": {"vendor": "amd", "arch": "gfx942:xnack-"}},
        "checks": [{"status": status} for status in statuses],
    }
    (tmp_path / "2026-01-01-x.json").write_text(json.dumps(record))
    rows = support.rows(support.recorded(tmp_path))
    (ran,) = [row for row in rows if row.loaded == "Chip X"]
    assert (ran.vendor, ran.archs, ran.computed) == ("amd", ("gfx942",), "2 of 3 checks passed on 2 GPUs")
    assert ran.evidence == "[2026-01-01-x](benchmarks/results/2026-01-01-x.md)"
    (others,) = [row for row in rows if row.vendor == "amd" and row is not ran]
    assert others.computed == "no" and "gfx942" not in others.archs


def test_a_readme_without_the_marks_is_refused(support: Any) -> None:
    made = support.table([])
    assert support.written(f"a{made}b", f"{made}") == f"a{made}b"
    for text in ("", support.BEGIN, support.END + support.BEGIN):
        with pytest.raises(ValueError, match="put them back"):
            support.written(text, made)


def test_a_wrong_request_is_said(support: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert support.main(["--now"]) == 2
    assert "found --now" in capsys.readouterr().err
    assert support.main([]) == 0
    assert capsys.readouterr().out.startswith(support.BEGIN)
