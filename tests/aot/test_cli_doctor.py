"""`kvbuild doctor`: says what is there and what is missing, and never fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kvbuild.aot.cli import doctor

Run = Callable[..., Any]


def test_it_names_tools_devices_and_the_cache(kvbuild: Run, build_cache: Path, host_arch: str) -> None:
    text = kvbuild("doctor")
    assert text.code == 0
    for words in (f"triton {metadata.version('triton')}", f"cpu:{host_arch}", str(build_cache), "ptxas"):
        assert words in text.out
    found = json.loads(kvbuild("doctor", "--json").out)
    assert found["packages"]["torch"] == metadata.version("torch")
    assert {one["vendor"] for one in found["toolchains"]} >= {"nvidia", "amd", "cpu"}
    assert all(one["ready"] for one in found["toolchains"] if one["vendor"] in ("nvidia", "amd", "cpu"))
    assert found["devices"][0]["vendor"] == "cpu"
    assert found["cache"] == {"folder": str(build_cache), "writable": True, "problem": None}


def test_what_is_missing_comes_with_the_pip_line(kvbuild: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name in ("torch", "ziglang"):
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    done = kvbuild("doctor")
    assert done.code == 0
    missing = [line for line in done.out.splitlines() if line.startswith("missing: ")]
    assert any("torch" in line and "pip install torch" in line for line in missing)
    assert any("ziglang" in line and "pip install 'kvbuild[compile]'" in line for line in missing)
    assert "nothing is missing" not in done.out


def test_a_cache_that_cannot_be_written_is_a_finding(
    kvbuild: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("KVBUILD_CACHE", str(file))
    done = kvbuild("doctor")
    assert done.code == 0
    assert "not writable" in done.out and "KVBUILD_CACHE" in done.out


def test_a_broken_build_yaml_is_a_finding(
    kvbuild: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "build.yaml").write_text("version: [")
    monkeypatch.chdir(tmp_path)
    found = doctor.examine()
    assert found["config"]["problem"] and found["config"]["problem"] in found["missing"]
    assert kvbuild("doctor").code == 0
