"""`kvbuild tune` without a GPU: what it refuses, what it makes of the times it is given, what it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbuild import runtime
from kvbuild.aot import tuning
from kvbuild.aot.choice import Candidate
from kvbuild.aot.measure import candidates, provenance
from kvbuild.aot.measure.timing import Timing
from kvbuild.kernels.gpgpu import route, space
from kvbuild.runtime.launchtable import Tile as ManifestTile

Run = Callable[..., Any]
TILES = space.candidates(("stream", "cluster", "block"), 227 << 10)


def variant(ratio: int, layout: str, names: list[str], scratch: int) -> SimpleNamespace:
    return SimpleNamespace(ratio=ratio, layout=layout, kernels=names, scratch_per_output=scratch)


class Operator:
    """An operator of a tuning bundle, as far as `tune` looks at it."""

    device = "cuda:0"

    def __init__(self, ratios: Sequence[int] = (128, 256, 512)) -> None:
        kernels, variants = [], []
        for ratio in ratios:
            for tile in TILES:
                forms = route.kernels_for(ratio, "aligned", tile)
                names = [f"{form.function}-c{ratio}-{tile.tag}" for form in forms]
                facts = {"tile": ManifestTile(**tile.to_json()), "shared": space.ring_bytes(tile)}
                kernels += [SimpleNamespace(name=name, **facts) for name in names]
                variants.append(variant(ratio, "aligned", names, route.scratch_per_output(tile)))
            variants.append(variant(ratio, "general", names, 0))
        self.variants = variants
        self.target = SimpleNamespace(
            name="nvidia:sm_90", vendor="nvidia", arch="sm_90", route="gpgpu", kernels=kernels,
            source_digest="0" * 64, toolchain={"triton": "3.9.0", "tiles": "x"},
            tools={"triton": "3.9.0"},
        )  # fmt: skip
        self.pinned: list[int | None] = []

    def pin(self, variant: int | None) -> None:
        self.pinned.append(variant)

    def compress(self, *arguments: object) -> None:
        pass

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Laboratory:
    """Times by a formula: clusters are fast for few outputs, streams for many."""

    no_reader = "no NVRTC here"

    def __init__(self, operator: Any, device: torch.device, effort: Any, say: Callable[[str], None]) -> None:
        self.effort, self.say = effort, say

    def prepare(self, ratio: int) -> None:
        pass

    def ceiling(self, outputs: int) -> tuple[Timing, str]:
        return Timing.of([1.0 + outputs]), "torch.sum"

    def measure(self, outputs: int, found: Sequence[Candidate]) -> dict[Candidate, Timing]:
        slow = {"stream": 9.0 + 1.1 * outputs, "cluster": 3.0 + 2 * outputs, "block": 10.0 + 3 * outputs}
        return {
            each: Timing.of([slow[each.tile.form] + each.tile.num_stages / 100 + each.scratch / 10000])
            for each in found
        }


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host with a GPU, as far as it can be pretended, and a bundle's file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runtime, "load", lambda path, device: Operator())
    monkeypatch.setattr(candidates, "Laboratory", Laboratory)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(provenance, "driver_release", lambda: "580.159.04")
    path = tmp_path / "space.kvb"
    path.write_text("")
    return path


def test_it_writes_the_table_that_the_builder_reads(kvbuild: Run, gpu: Path) -> None:
    done = kvbuild("tune", gpu)
    assert done.code == 0, done.err
    path = gpu.with_name("nvidia-sm_90.yaml")
    table = tuning.parse(path.read_text(), str(path), "nvidia:sm_90")
    assert table.measured
    for words in ("NVIDIA H200", "driver 580.159.04", "triton 3.9.0", f"torch {torch.__version__}"):
        assert words in table.source
    for ratio, rows in table.rows.items():
        assert [row.tile.tag for row in rows] == ["t4d64s1w4n1c", "t8d512s1w4n1"], ratio
        assert [row.max_outputs for row in rows] == [6, None], "3 + 2n < 9 + 1.1n up to 6"
    assert "so few outputs fill the chip; " in path.read_text()
    assert "no NVRTC here" in done.out and f"{path.name}: written" in done.out
    assert done.out.endswith(f": kvbuild compile --target nvidia:sm_90 --tuning {path.name}\n")
    assert sorted(entry.name for entry in gpu.parent.iterdir()) == ["nvidia-sm_90.yaml", "space.kvb"]


def test_json_has_every_time(kvbuild: Run, gpu: Path, tmp_path: Path) -> None:
    done = kvbuild("tune", gpu, "--quick", "--json", "-o", tmp_path / "t.yaml")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["table"] == str(tmp_path / "t.yaml") and found["device"] == "NVIDIA H200" and found["quick"]
    points = found["ratios"]["512"]["points"]
    assert [point["outputs"] for point in points] == [1, 4, 16, 64, 256]
    assert len(points[0]["times"]) == len(TILES) and points[0]["ceiling"]["by"] == "torch.sum"
    assert points[0]["times"][0] == {
        "tile": "t4d64s1w4n1c", "variant": 2 * (len(TILES) + 1) + 4,
        "median": 5.01, "low": 5.01, "high": 5.01, "samples": 1,
    }  # fmt: skip
    assert [row["max_outputs"] for row in found["ratios"]["512"]["rows"]] == [10, None]


def test_a_failure_leaves_the_old_table(kvbuild: Run, gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise runtime.DeviceError("CUDA_ERROR_LAUNCH_FAILED")

    table = gpu.with_name("nvidia-sm_90.yaml")
    table.write_text("old")
    monkeypatch.setattr(Laboratory, "measure", fail)
    done = kvbuild("tune", gpu)
    assert done.code == 1 and "CUDA_ERROR_LAUNCH_FAILED" in done.err
    assert table.read_text() == "old"
    assert sorted(entry.name for entry in gpu.parent.iterdir()) == ["nvidia-sm_90.yaml", "space.kvb"]


@pytest.mark.parametrize("arguments", [["--device", "cpu"], []])
def test_a_cpu_target_has_nothing_to_tune(
    arguments: list[str], kvbuild: Run, cpu_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = kvbuild("tune", cpu_bundle, *arguments)
    assert (done.code, done.out) == (2, "")
    assert "one config and nothing to tune; name a GPU with --device" in done.err
    assert list(tmp_path.iterdir()) == []


def test_the_cpu_is_refused_whatever_the_bundle_holds(kvbuild: Run, gpu: Path) -> None:
    done = kvbuild("tune", gpu, "--device", "cpu")
    assert done.code == 2 and "nothing to tune" in done.err


def test_the_gpus_commands_import_without_the_builders_packages(tmp_path: Path) -> None:
    modules = [f"kvbuild.aot.{name}" for name in (
        "cli.tune", "cli.bench", "choice", "tabletext", "publish", "plot", "measure.candidates",
        "measure.hostcost", "measure.provenance", "measure.versus",
    )]  # fmt: skip
    code = (
        "import importlib, sys\n"
        "for name in ('triton', 'yaml', 'rich', 'ziglang', 'matplotlib'): sys.modules[name] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_wrong_requests(kvbuild: Run, gpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, words in (
        (["absent.kvb"], "wanted a readable file, found nothing"),
        ([gpu, "-o", "none/t.yaml"], "no folder none"),
        ([gpu, "--device", "banana"], "--device: wanted cpu, cuda"),
    ):
        done = kvbuild("tune", *arguments)
        assert done.code == 2 and words in done.err
    monkeypatch.setattr(runtime, "load", lambda path, device: Operator((128, 512)))
    done = kvbuild("tune", gpu)
    assert done.code == 2 and "found none of 256; build it with `kvbuild compile --tune-space`" in done.err
    monkeypatch.setattr(runtime, "load", lambda path, device: Operator())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = kvbuild("tune", gpu)
    assert done.code == 3 and "sees no GPU" in done.err
