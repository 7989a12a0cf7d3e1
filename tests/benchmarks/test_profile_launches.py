"""The script that a profiler runs: launches what was asked, and refuses the rest in words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "profile_launches.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments), "--device", "cpu"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_launches_the_workload(cpu_bundle: Path) -> None:
    done = run(cpu_bundle, "decode-1-c128", "--calls", 3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("decode-1-c128: 3 calls on cpu")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["decode-2-c128"], "wanted one of prefill-1x8192-c128, "),
        (["decode-1-c128", "--variant", "0"], "a cpu target has one kernel"),
    ],
)
def test_wrong_requests_are_code_2(cpu_bundle: Path, arguments: list[str], words: str) -> None:
    done = run(cpu_bundle, *arguments)
    assert done.returncode == 2 and words in done.stderr


def test_no_bundle(tmp_path: Path) -> None:
    done = run(tmp_path / "nothing.kvb", "decode-1-c128")
    assert done.returncode == 2 and "wanted a bundle file" in done.stderr
