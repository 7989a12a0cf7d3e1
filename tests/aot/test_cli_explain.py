"""`kvbuild explain`: the decision for this host and for one described by its facts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def facts(host_arch: str) -> dict[str, Any]:
    """A GPU host that no test machine is."""
    return {
        "vendor": "nvidia",
        "arch": "sm_90",
        "name": "a GPU",
        "index": 0,
        "driver": 13000,
        "driver_library": "libcuda.so.1",
        "host": "x86_64",
        "libc": "2.36",
    }


def written(tmp_path: Path, value: object) -> Path:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(value))
    return path


def test_this_host_loads_its_cpu_target(cpu_bundle: Path, host_arch: str, kvbuild: Run) -> None:
    text = kvbuild("explain", cpu_bundle, "--device", "cpu")
    assert text.code == 0
    assert f"loads cpu:{host_arch} with the launcher for {host_arch}-linux-gnu" in text.out
    found = json.loads(kvbuild("explain", cpu_bundle, "--device", "cpu", "--json").out)
    assert found["chosen"] == f"cpu:{host_arch}"
    assert found["facts"]["vendor"] == "cpu"


def test_another_host_is_refused_with_the_trace(
    cpu_bundle: Path, facts: dict[str, Any], tmp_path: Path, kvbuild: Run
) -> None:
    path = written(tmp_path, facts)
    text = kvbuild("explain", cpu_bundle, "--facts", path)
    assert text.code == 1
    assert "its vendor is cpu, this device's is nvidia" in text.out
    assert "kvbuild compile --target nvidia:sm_90" in text.out
    done = kvbuild("explain", cpu_bundle, "--facts", path, "--json")
    found = json.loads(done.out)
    assert (done.code, found["chosen"]) == (1, None)
    assert [verdict["accepted"] for verdict in found["trace"]] == [False]


def test_what_one_host_printed_another_reads(cpu_bundle: Path, tmp_path: Path, kvbuild: Run) -> None:
    printed = json.loads(kvbuild("explain", cpu_bundle, "--device", "cpu", "--json").out)
    again = kvbuild("explain", cpu_bundle, "--facts", written(tmp_path, printed), "--json")
    assert json.loads(again.out)["facts"] == printed["facts"]
    assert again.code == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "wanted JSON"),
        ("{}", "vendor"),
        ('{"facts": {"vendor": 1}}', "facts.json"),
        ("[" * 100_000, "nested too deeply"),
        ('{"facts": {}, "facts": {}}', "repeated"),
        ('"\\ud800"', "wanted"),
        (" " * (17 << 20), "wanted at most"),
    ],
)
def test_facts_that_are_none_are_a_wrong_request(
    content: str, words: str, cpu_bundle: Path, tmp_path: Path, kvbuild: Run
) -> None:
    path = tmp_path / "facts.json"
    path.write_text(content)
    done = kvbuild("explain", cpu_bundle, "--facts", path)
    assert (done.code, done.out) == (2, "")
    assert words in done.err and str(path) in done.err


def test_wrong_options_are_wrong_requests(cpu_bundle: Path, tmp_path: Path, kvbuild: Run) -> None:
    assert kvbuild("explain", cpu_bundle, "--device", "cudda").code == 2
    missing = kvbuild("explain", cpu_bundle, "--facts", tmp_path / "none.json")
    assert missing.code == 2 and "found nothing" in missing.err
    both = kvbuild("explain", cpu_bundle, "--device", "cpu", "--facts", tmp_path / "none.json")
    assert both.code == 2 and "exclude each other" in both.err


def test_facts_may_come_through_a_pipe(cpu_bundle: Path, kvbuild: Run) -> None:
    printed = kvbuild("explain", cpu_bundle, "--device", "cpu", "--json").out
    read, write = os.pipe()
    os.write(write, printed.encode())
    os.close(write)
    done = kvbuild("explain", cpu_bundle, "--facts", f"/dev/fd/{read}", "--json")
    os.close(read)
    assert done.code == 0 and json.loads(done.out)["facts"] == json.loads(printed)["facts"]


def test_a_device_is_no_file_of_facts(cpu_bundle: Path, kvbuild: Run) -> None:
    done = kvbuild("explain", cpu_bundle, "--facts", "/dev/zero")
    assert (done.code, done.out) == (2, "") and "a device, socket or pipe" in done.err
