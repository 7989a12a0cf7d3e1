"""`kvbuild compile`: what is refused before anything is compiled, what is reported, what is left behind."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbuild.aot import build, toolchain
from kvbuild.aot.build import BuildResult, Failure, Report
from kvbuild.runtime.bundle import open_bundle

Run = Callable[..., Any]

CONFIG = """\
version: 1
compress_ratios: [128]
state_block_sizes: [8, any]
hosts: [x86_64-linux-gnu.2.17, aarch64-linux-gnu.2.17]
numerics: {fp_fusion: false}
targets:
  cpu:
    archs: [x86_64, aarch64]
"""


@pytest.fixture
def never_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the build was started")

    monkeypatch.setattr(build, "build", refuse)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nvidia:sm_90"),
        (["--target", "nvida"], "unknown vendor 'nvida'"),
        (["--target", "nvidia:sm_1"], "sm_1"),
        (["--target", "cpu", "--config", "none.yaml"], "none.yaml"),
        (["--target", "cpu", "--jobs", "0"], "--jobs"),
        (["--target", "cpu", "-o", "none/x.kvb"], "no folder none"),
        (["--target", "cpu", "-o", "."], "a folder there"),
        (["--target", "cpu", "-o", "/proc/x.kvb"], "found that no file can be made in /proc (No such file"),
        (["--target", "ascend:910B2", "--tune-space"], "found ascend, which has none"),
    ],
)
def test_wrong_requests_are_refused_before_the_build(
    arguments: list[str],
    words: str,
    kvbuild: Run,
    never_builds: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = kvbuild("compile", *arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    as_json = kvbuild("compile", *arguments, "--json")
    assert as_json.code == 2 and words in json.loads(as_json.out)["error"]["message"]


def test_a_wrong_build_yaml_names_file_line_and_key(kvbuild: Run, never_builds: None, tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(CONFIG.replace("hosts:", "host:"))
    done = kvbuild("compile", "--config", config, "--target", "cpu", "-o", tmp_path / "x.kvb")
    assert done.code == 2
    assert f"{config}:4" in done.err and "host" in done.err


def test_a_cache_that_cannot_be_written_is_a_wrong_request(
    kvbuild: Run, never_builds: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVBUILD_CACHE", str(tmp_path / "file"))
    done = kvbuild("compile", "--target", "cpu", "-o", tmp_path / "x.kvb")
    assert done.code == 2 and "KVBUILD_CACHE" in done.err


def test_a_missing_toolchain_is_code_3_but_a_wrong_request_comes_first(
    kvbuild: Run, never_builds: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(vendor: str, *_: object) -> toolchain.Toolchain:
        return toolchain.Toolchain(vendor, (), {}, (f"{vendor}: no compiler; pip install it",))

    monkeypatch.setattr(toolchain, "probe", probe)
    good = ["compile", "--target", "nvidia:sm_90", "-o", tmp_path / "x.kvb"]
    done = kvbuild(*good)
    assert (done.code, done.out) == (3, "")
    assert "no compiler; pip install it" in done.err
    assert kvbuild(*good, "--target", "nope").code == 2
    assert kvbuild(*good, "-o", tmp_path).code == 2


TILE = "{block_t: 4, block_d: 512, split: 1, num_warps: 8, num_stages: 1, cluster: false}"
TABLE = "target: TARGET\nmeasured: true\nsource: a sentence\nrows:\n" + "".join(
    f"  {ratio}:\n    - {{max_outputs: null, tile: {TILE}, reason: any}}\n" for ratio in (128, 256, 512)
)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans that would have been built; each build fails."""
    plans: list[Any] = []

    def refuse(plan: Any, **_: object) -> BuildResult:
        plans.append(plan)
        return BuildResult(None, {}, Report(0, 0, 0, 0, 0.0, (Failure("all", "not wanted"),), ()))

    monkeypatch.setattr(build, "build", refuse)
    return plans


def test_a_tuning_table_takes_the_place_of_the_packaged_one(
    kvbuild: Run, planned: list[Any], tmp_path: Path
) -> None:
    table, out = tmp_path / "mine.yaml", tmp_path / "x.kvb"
    table.write_text(TABLE.replace("TARGET", "nvidia:sm_80"))
    wanted = ("compile", "--target", "nvidia:sm_80", "--target", "nvidia:sm_86", "-o", out)
    assert kvbuild(*wanted, "--tuning", table).code == 1 and kvbuild(*wanted).code == 1
    (own, other), packaged = planned[0].targets, planned[1].targets
    assert {kernel.tile.num_warps for kernel in own.kernels} == {8} and own.toolchain["tiles"] == "measured"
    assert other == packaged[1] and own != packaged[0] and "not" in packaged[0].toolchain["tiles"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("nvidia:sm_1", "mine.yaml:1: target: wanted one of amd:gfx90a, "),
        ("nvidia:sm_90", "found one for nvidia:sm_90; add --target nvidia:sm_90, or leave it out"),
        ("nvidia:sm_80", "wanted one table for nvidia:sm_80, found a second"),
        ("nvidia:sm_86", "delete targets.nvidia.tiles.sm_86 there"),
    ],
)
def test_a_tuning_table_that_nobody_asked_for(
    table: str, words: str, kvbuild: Run, never_builds: None, tmp_path: Path
) -> None:
    config, mine, second = (tmp_path / name for name in ("build.yaml", "mine.yaml", "second.yaml"))
    tiles = f"{{sm_86: [{TILE}]}}"
    config.write_text(f"{CONFIG}  nvidia:\n    archs: [sm_80, sm_86, sm_90]\n    tiles: {tiles}\n")
    mine.write_text(TABLE.replace("TARGET", table))
    second.write_text(TABLE.replace("TARGET", "nvidia:sm_80"))
    wanted = ("compile", "--config", config, "--target", "nvidia:sm_80", "--target", "nvidia:sm_86")
    done = kvbuild(*wanted, "-o", tmp_path / "x.kvb", "--tuning", second, "--tuning", mine)
    assert (done.code, done.out) == (2, "") and words in done.err
    absent = kvbuild(*wanted, "-o", tmp_path / "x.kvb", "--tuning", tmp_path / "none.yaml")
    assert absent.code == 2 and "--tuning: wanted a readable file, found nothing at" in absent.err


def test_it_writes_the_bundle_and_says_so(
    kvbuild: Run, cpu_bundle: Path, host_arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = kvbuild("compile", "--target", f"cpu:{host_arch}", "--json")
    assert done.code == 0, done.err
    path = tmp_path / "artifacts" / "kvcompress.kvb"
    found = json.loads(done.out)
    assert found["ok"] and Path(found["bundle"]) == path.relative_to(tmp_path)
    assert found["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found["size"] == path.stat().st_size
    assert [target["target"] for target in found["targets"]] == [f"cpu:{host_arch}"]
    # The shared bundle came from the same cache, so nothing was compiled again and the bytes are equal.
    assert found["launchers"] == {"compiled": 0, "cached": 1}
    assert path.read_bytes() == cpu_bundle.read_bytes()
    text = kvbuild("compile", "--target", f"cpu:{host_arch}", "-o", tmp_path / "again.kvb")
    assert text.code == 0 and found["sha256"] in text.out
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["again.kvb", "artifacts"]


def test_what_is_not_known_of_the_result_is_said_last(
    kvbuild: Run, cpu_bundle: Path, host_arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_bundle(cpu_bundle) as opened:
        manifest, blobs = opened.manifest, {name: opened.read(name) for name in opened.manifest.blobs}
    (target,) = manifest.targets
    told = replace(target, toolchain={**target.toolchain, "evidence": "never loaded"})
    result = BuildResult(replace(manifest, targets=(told,)), blobs, Report(0, 0, 0, 0, 0.0, (), ()))
    monkeypatch.setattr(build, "build", lambda *_, **__: result)
    done = kvbuild("compile", "--target", f"cpu:{host_arch}", "-o", tmp_path / "x.kvb")
    assert done.code == 0 and done.out.endswith(f"\ncpu:{host_arch}: never loaded\n")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every build end with a failed unit, after it built what it could."""
    real = build.build

    def fail(*arguments: Any, **options: Any) -> BuildResult:
        result = real(*arguments, **options)
        report = replace(
            result.report,
            failures=(Failure("nvidia:sm_90 some-kernel", "ptxas: out of registers\nsecond line"),),
            dropped=("nvidia:sm_90: the whole target",),
        )
        return BuildResult(result.manifest if options["keep_going"] else None, result.blobs, report)

    monkeypatch.setattr(build, "build", fail)


def test_a_failed_unit_is_named_and_no_bundle_is_written(
    kvbuild: Run, cpu_bundle: Path, host_arch: str, failing: None, tmp_path: Path
) -> None:
    out = tmp_path / "x.kvb"
    done = kvbuild("compile", "--target", f"cpu:{host_arch}", "-o", out)
    assert (done.code, done.out) == (1, "")
    assert "nvidia:sm_90 some-kernel" in done.err and "ptxas: out of registers" in done.err
    assert "no bundle was written" in done.err and list(tmp_path.iterdir()) == []
    as_json = kvbuild("compile", "--target", f"cpu:{host_arch}", "-o", out, "--json")
    found = json.loads(as_json.out)
    assert (as_json.code, found["ok"], found["bundle"]) == (1, False, None)
    assert found["failures"][0]["name"] == "nvidia:sm_90 some-kernel"


def test_keep_going_writes_the_rest_and_is_code_1_all_the_same(
    kvbuild: Run, cpu_bundle: Path, host_arch: str, failing: None, tmp_path: Path
) -> None:
    out = tmp_path / "x.kvb"
    done = kvbuild("compile", "--target", f"cpu:{host_arch}", "-o", out, "--keep-going")
    assert done.code == 1
    assert str(out) in done.out and "left out: nvidia:sm_90" in done.err
    assert kvbuild("verify", out).code == 0


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    cache, out = tmp_path / "cache", tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-m", "kvbuild.aot.cli.main", "compile"]
    command += ["--target", "nvidia:sm_90", "-o", str(out / "x.kvb")]
    process = subprocess.Popen(
        command,
        env={**os.environ, "KVBUILD_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # The cache folder is made just before the first compilation, which takes seconds.
    deadline = time.monotonic() + 60
    while not cache.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr and "Traceback" not in stderr and stdout == ""
    assert list(out.iterdir()) == []
