"""`kvbuild finish` and what other commands say of an unfinished bundle, with a stand-in hivmc."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cann import environment

from kvbuild.aot import build
from kvbuild.aot.cli import compile
from kvbuild.aot.finish import finish
from kvbuild.aot.targets import ascend
from kvbuild.runtime.bundle import open_bundle


@pytest.fixture
def host(cann: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(cann))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


def test_the_command(host: None, kvbuild: Callable[..., Any], unfinished: Path, tmp_path: Path) -> None:
    out = tmp_path / "done.kvb"
    done = kvbuild("finish", unfinished, "-o", out, "--json")
    assert done.code == 0
    said = json.loads(done.out)
    assert said["finished"] == ["ascend:910B1", "ascend:910B2"]
    assert said["hivmc"]["version"] == "1.4.2" and said["bundle"] == str(out)
    assert done.err.count("hivmc: ascend:910B1 ") == said["compiled"]
    again = kvbuild("finish", out)
    assert again.code == 2 and "finished already" in again.err
    done = kvbuild("finish", unfinished)
    assert done.code == 0 and f"kvbuild check {unfinished}" in done.out
    assert unfinished.read_bytes() == out.read_bytes()


def test_what_it_prints_does_not_steer_the_terminal(
    host: None, kvbuild: Callable[..., Any], unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN", "escapes")
    done = kvbuild("finish", unfinished)
    assert done.code == 1 and r"\x1b[2J\ufffd wiped" in ascii(done.err).replace("\\\\", "\\")


def test_an_unfinished_bundle_is_called_so_with_the_command(
    kvbuild: Callable[..., Any],
    unfinished: Path,
    cann: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "a b.kvb"
    unfinished.rename(path)
    line = (
        f"ascend:910B1, ascend:910B2 are compiled as far as HIVM: run `kvbuild finish '{path}'` on a host "
        "with CANN 8.5 or newer"
    )
    for name in ("list", "verify"):
        done = kvbuild(name, path)
        assert done.code == 0 and done.out.splitlines()[-1] == line
    with open_bundle(path) as bundle:
        manifest = bundle.manifest
    compile._say(build.BuildResult(manifest, {}, build.Report(0, 0, 0, 0, 0.0, (), ())), path)
    assert capsys.readouterr().out.splitlines()[-1] == line
    shown = kvbuild("inspect", path).out
    assert shown.count("ELF machine not yet") == 2 and "ELF machine 0" not in shown
    how = f"hivm, unfinished: run `kvbuild finish '{path}'` on a host with CANN 8.5 or newer\n"
    assert shown.count(f"  compiled to   {how}") == 2
    assert shown.count("  toolchain     triton 3.2.0\n  evidence      none\n") == 2
    finish(path, path, environment(cann))
    for name in ("list", "verify", "inspect"):
        assert "as far as HIVM" not in kvbuild(name, path).out
    assert "ELF machine 4137\n  compiled to   device\n" in kvbuild("inspect", path).out


def test_the_pages_facts_are_a_910B2_hosts(
    kvbuild: Callable[..., Any], unfinished: Path, cann: Path, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs/ascend.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    facts = tmp_path / "910B2.json"
    facts.write_text(text)
    done = kvbuild("explain", unfinished, "--facts", facts)
    assert done.code == 1 and "ascend:910B2 is for this device and not finished: kvbuild finish" in done.out
    finish(unfinished, unfinished, environment(cann))
    done = kvbuild("explain", unfinished, "--facts", facts)
    assert done.code == 0 and "loads ascend:910B2 with the launcher for aarch64-linux-gnu.2.17" in done.out
    for soc in ("910B2C", "910B4-1", "910_9392"):
        facts.write_text(text.replace("Ascend910B2", f"Ascend{soc}"))
        done = kvbuild("explain", unfinished, "--facts", facts)
        assert done.code == 1
        last = done.out.splitlines()[-1]
        assert last.startswith(f"kvbuild has no target for ascend:{soc}; it has ascend:910B1, ascend:910B2")


def test_the_page_lists_the_chips_that_there_are() -> None:
    page = (Path(__file__).parents[2] / "docs/ascend.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \| Ascend(\w+) \|$", page, re.MULTILINE) == [
        (arch, arch) for arch in ascend.ARCHS
    ]


def test_the_command_without_cann(kvbuild: Callable[..., Any], unfinished: Path, tmp_path: Path,
                                  monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    done = kvbuild("finish", unfinished)
    assert done.code == 3 and "install the CANN toolkit" in done.err
    done = kvbuild("finish", tmp_path / "nothing.kvb")
    assert done.code == 2
    done = kvbuild("finish", unfinished, "-o", os.path.join(tmp_path, "none", "out.kvb"))
    assert done.code == 2
