"""From `kvbuild compile` to `op.compress`: the real toolchain up to HIVM, then stand-ins for hivmc and ACL.

The stand-in hivmc answers a stage's HIVM with the same stage lowered to this host, so that the bundle that is
loaded computes; what hivmc and a chip would do is not tested.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import pytest
import tvm_ffi
from bench import ARCH, ELF_MACHINE, Bench
from hosttools import LEFT_OUT, WANTED, own_environment

from kvbuild.runtime.bundle import open_bundle

if not os.environ.get(WANTED):
    pytest.skip(LEFT_OUT, allow_module_level=True)

# Every stage is compiled, twice over, in the first test's setup.
pytestmark = pytest.mark.timeout(1800)

HERE = Path(__file__).parent
HIVMC = """
import hashlib, json, os, sys

if sys.argv[1:] == ["--version"]:
    print("hivmc 0.0.0 (a stand-in)")
    sys.exit(0)
text = open(sys.argv[1], "rb").read()
path, entry = json.load(open(os.environ["STAND_IN_OBJECTS"]))[hashlib.sha256(text).hexdigest()]
open(sys.argv[-1], "wb").write(open(path, "rb").read() + entry.encode())
"""


def command(*arguments: object, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {**own_environment(), **changes}
    words = [sys.executable, "-m", "kvbuild.aot.cli.main", *map(str, arguments)]
    return subprocess.run(words, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def compiled(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle as a machine without CANN builds it."""
    path = tmp_path_factory.mktemp("compiled") / "ascend.kvb"
    done = command("compile", "--target", f"ascend:{ARCH}", "-o", path)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def finished(bench: Bench, compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, finished."""
    folder = tmp_path_factory.mktemp("finished")
    with open_bundle(compiled) as bundle:
        (target,) = bundle.manifest.targets
        assert target.staged is not None
        objects = {
            kernel.blob: (str(bench.folder / "blobs" / kernel.name), kernel.entry)
            for kernel in target.staged.kernels
        }
    (folder / "objects.json").write_text(json.dumps(objects))
    tool = folder / "hivmc"
    tool.write_text(f"#!{sys.executable} -S\n{HIVMC}")
    tool.chmod(0o755)
    out = folder / "ascend.kvb"
    done = command(
        "finish", compiled, "-o", out, "--hivmc", tool, STAND_IN_OBJECTS=str(folder / "objects.json")
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shim")
    include = tvm_ffi.libinfo.find_dlpack_include_path()
    harness.build_shared("relabel.c", folder, "relabel.so", folder, "-isystem", include)
    return folder / "relabel.so"


def serve(bench: Bench, bundle: Path, shim: Path, folder: Path, **settings: str) -> tuple[Any, list[Any]]:
    """What serve.py says, and the launches that the stand-in ACL got."""
    log = folder / "calls.jsonl"
    log.unlink(missing_ok=True)
    environment = {
        **os.environ, "LD_LIBRARY_PATH": str(bench.folder / "driver"), "KVB_STANDIN_LOG": str(log),
        "KVB_STANDIN_SILENT": "1", "OMP_NUM_THREADS": "1", "KVB_RELABEL_STREAM": "0", **settings,
    }  # fmt: skip
    environment.pop("TVM_FFI_DISABLE_TORCH_C_DLPACK", None)
    words = [sys.executable, str(HERE / "serve.py"), str(bundle), str(shim)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return json.loads(done.stdout), [call for call in calls if call["call"] == "launch"]


def test_an_unfinished_bundle_is_refused_with_the_way_to_finish_it(
    bench: Bench, compiled: Path, shim: Path, tmp_path: Path
) -> None:
    said, launches = serve(bench, compiled, shim, tmp_path)
    assert said["refused"][0] == "NoMatchingArtifact"
    assert "kvbuild finish" in said["refused"][1] and "CANN" in said["refused"][1]
    assert launches == []


def test_another_chip_is_told_what_there_is(bench: Bench, finished: Path, shim: Path, tmp_path: Path) -> None:
    said, launches = serve(bench, finished, shim, tmp_path, KVB_STANDIN_SOC="Ascend910B4")
    assert said["refused"][0] == "NoMatchingArtifact"
    assert f"ascend:{ARCH}" in said["refused"][1] and "910B4" in said["refused"][1]
    assert launches == []


def test_a_finished_bundle_serves(bench: Bench, finished: Path, shim: Path, tmp_path: Path) -> None:
    said, launches = serve(bench, finished, shim, tmp_path)
    assert said["device"] == "npu:0" and said["target"] == f"ascend:{ARCH}"
    for ratio, verdicts in said["verdicts"].items():
        for how, (right, words) in verdicts.items():
            assert right, f"ratio {ratio}, {how}: {words}"
    assert said["counters"]["calls"] == 9
    # torch_npu's stream, as the stand-in for it says; each thread is told anew.
    assert {launch["stream"] for launch in launches} == {41}


def test_the_page_has_the_bytes_of_the_unified_buffer(compiled: Path) -> None:
    lines = (HERE.parents[1] / "docs/ascend.md").read_text().splitlines()

    def said(stage: str) -> int:
        """The first number of a row that begins with this stage."""
        (row,) = (line for line in lines if line.startswith(f"| {stage} | ") and line[-3].isdigit())
        return int(row.split("|")[2].replace(",", ""))

    with open_bundle(compiled) as bundle:
        (target,) = bundle.manifest.targets
        assert target.staged is not None
        found = {kernel.name: kernel.ub_bytes for kernel in target.staged.kernels}
    for ratio in (128, 256, 512):
        assert found[f"scan-c{ratio}-d512"] == said("`scan`")
        assert found[f"blocks-c{ratio}-aligned-d512"] == said("`blocks`, block_size 8")
        assert found[f"blocks-c{ratio}-general-d512"] == said("`blocks`, any block_size")
        assert found[f"locate-c{ratio}"] == said("`locate`")
    for name in ("normalise", "encode", "scatter"):
        assert found[name] == said(f"`{name}`")


def test_finish_changes_the_kernels_alone(compiled: Path, finished: Path) -> None:
    with open_bundle(compiled) as old, open_bundle(finished) as new:
        (was,), (now,) = old.manifest.targets, new.manifest.targets
        assert was.launchers == now.launchers and was.launch_table == now.launch_table
        assert now.elf_machine == ELF_MACHINE
        assert was.staged is not None
        for kernel in was.staged.kernels:
            assert hashlib.sha256(old.read(kernel.blob)).hexdigest() == kernel.blob
            assert kernel.ub_bytes <= 196_608
