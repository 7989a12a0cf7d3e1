"""The whole way, as its users go it: compile, ship, load, call. And a build repeated to the byte."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

# One quick kernel and a host launcher: every stage of a build runs, none of them for long.
CONFIG = """\
version: 1
compress_ratios: [128]
state_block_sizes: [8, any]
hosts: [x86_64-linux-gnu.2.17, aarch64-linux-gnu.2.17]
numerics: {{fp_fusion: false}}
targets:
  nvidia:
    archs: [sm_80]
    tiles: {{sm_80: [{{block_t: 4, block_d: 64, split: 1, num_warps: 4, num_stages: 1}}]}}
  cpu:
    archs: [{arch}]
"""


def clone(folder: Path) -> Path:
    """A copy of the packages in another folder, importable as kvbuild.* from there."""
    for package in ("aot", "kernels", "runtime"):
        shutil.copytree(
            ROOT / package, folder / "kvbuild" / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    return folder


def start(source: Path, arguments: list[str], cache: Path, cwd: Path) -> subprocess.Popen[str]:
    """Starts the command line of the copy in `source`; -S keeps the editable install out."""
    paths = [str(source), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]
    code = f"import sys\nsys.path[:0] = {paths!r}\nfrom kvbuild.aot.cli.main import main\nsys.exit(main())"
    cwd.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-S", "-c", code, *arguments],
        cwd=cwd,
        # The workers are interpreters of their own, with this one's site folder.
        env={**os.environ, "KVBUILD_CACHE": str(cache), "TMPDIR": str(cwd)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, out + err


def test_two_builds_in_two_folders_give_the_same_bytes(tmp_path: Path, host_arch: str) -> None:
    made = []
    for name, jobs in (("one", "1"), ("another-folder", "4")):
        base = tmp_path / name
        source = clone(base / "src")
        config = base / "mine.yaml"
        config.write_text(CONFIG.format(arch=host_arch))
        order = ["--target", "nvidia", "--target", "cpu"]
        if jobs == "4":
            order = order[2:] + order[:2]
        arguments = ["compile", "--config", str(config), *order, "--jobs", jobs, "-o", str(base / "x.kvb")]
        finish(start(source, arguments, base / "cache", base / "work"))
        made.append((base / "x.kvb").read_bytes())
    assert made[0] == made[1]
    for path in (str(tmp_path), str(ROOT)):
        assert path.encode() not in made[0]


def test_eight_builders_may_share_a_cold_cache_and_one_output(
    tmp_path: Path, host_arch: str, cpu_bundle: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    arguments = ["compile", "--target", f"cpu:{host_arch}", "-o", str(out / "x.kvb")]
    source = clone(tmp_path / "src")
    processes = [start(source, arguments, tmp_path / "cache", tmp_path / f"work{i}") for i in range(8)]
    for process in processes:
        finish(process)
    assert [path.name for path in out.iterdir()] == ["x.kvb"]
    assert (out / "x.kvb").read_bytes() == cpu_bundle.read_bytes()


@pytest.mark.parametrize("folder", ["shipped", "shipped with spaces, ünïcode"])
def test_a_shipped_bundle_computes_on_a_bare_host(folder: str, tmp_path: Path, cpu_bundle: Path) -> None:
    """A read-only file, no HOME, nothing of the builder installed, no compiler on the PATH."""
    place = tmp_path / folder
    place.mkdir()
    path = place / "kvcompress.kvb"
    shutil.copy(cpu_bundle, path)
    path.chmod(0o444)
    place.chmod(0o555)
    code = f"""\
import sys
for name in ("triton", "ziglang", "yaml", "rich", "click"):
    sys.modules[name] = None
import torch
from kvbuild import runtime
from kvbuild.kernels import oracle, verdict, workloads
op = runtime.load({str(path)!r}, device="cpu")
inputs = workloads.make(workloads.Workload(2, 2048, 128, padding=3))
before = inputs.fresh()
result = op.compress(*inputs.call_args())
assert result is inputs.kv_cache
found = verdict.judge(result, before.kv_cache, oracle.expect(*before.call_args()))
assert found.right and found.outputs == 16, str(found)
assert not any(name.startswith("triton.") for name in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PATH": "/nonexistent"}, cwd="/", capture_output=True, text=True
    )
    place.chmod(0o755)
    assert done.returncode == 0, done.stderr


def test_compile_merge_and_load_as_the_readme_says(
    tmp_path: Path, host_arch: str, cpu_bundle: Path, kvbuild: Callable[..., Any]
) -> None:
    other = "aarch64" if host_arch == "x86_64" else "x86_64"
    other_bundle, both = tmp_path / "other.kvb", tmp_path / "both.kvb"
    assert kvbuild("compile", "--target", f"cpu:{other}", "-o", other_bundle).code == 0
    assert kvbuild("explain", other_bundle, "--device", "cpu").code == 1
    refused = kvbuild("check", other_bundle, "--device", "cpu")
    assert refused.code == 1 and f"cpu:{other}" in refused.err
    assert kvbuild("merge", other_bundle, cpu_bundle, "-o", both).code == 0
    done = kvbuild("check", both, "--device", "cpu", "--workload", "decode-8-c128")
    assert done.code == 0 and f"cpu:{host_arch}" in done.out
