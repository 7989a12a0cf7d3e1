"""`kvbuild bench` on the cpu: its JSON, its files, its refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbuild import runtime
from kvbuild.aot.measure import versus
from kvbuild.kernels.workloads import WORKLOADS, Workload

Run = Callable[..., Any]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small workloads, little memory, one thread."""
    monkeypatch.setattr(versus, "WORKLOADS", (Workload(1, 256, 128), Workload(1, 512, 256)))
    monkeypatch.setattr(versus, "DECODE_OUTPUTS", (0, 1))
    monkeypatch.setattr(versus, "QUICK_HOST_BYTES", 4 << 20)
    monkeypatch.setenv("KVBUILD_NUM_THREADS", "1")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_json_and_table(
    kvbuild: Run, cpu_bundle: Path, host_arch: str, small: None, no_matplotlib: None, tmp_path: Path
) -> None:
    folder = tmp_path / "made" / "here"
    done = kvbuild("bench", cpu_bundle, "--device", "cpu", "--quick", "--json", "-o", folder)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["target"] == f"cpu:{host_arch}" and found["quick"] and "1 threads" in found["device"]
    names = [row["name"] for row in found["rows"]]
    assert names == ["prefill-1x256-c128", "prefill-1x512-c256", "decode-1-c128"]
    for row in found["rows"]:
        assert set(row["callers"]) == {"kvbuild", "PyTorch eager"} and row["not_measured"] == {}
        assert row["bytes"] == row["outputs"] * row["ratio"] * 4096
        assert row["bytes"] * row["sets"] >= 4 << 20
        assert row["ceiling"]["by"].startswith("torch.") and row["ceiling"]["median"] > 0
        for each in row["callers"].values():
            assert each["low"] <= each["median"] <= each["high"] and each["wrong_bytes"] == 0
            assert each["of_ceiling"] == pytest.approx(row["ceiling"]["median"] / each["median"], rel=1e-2)
    assert found["host"]["outputs"] == 0 and found["host"]["callers"]["kvbuild"]["batch"] > 0
    assert set(found["summary"]) == {"prefill", "decode"}
    assert json.loads((folder / "bench.json").read_text()) == found
    assert [path.name for path in folder.iterdir()] == ["bench.json"]
    assert "pip install 'kvbuild[bench]'" in done.err


def test_text(
    kvbuild: Run, cpu_bundle: Path, small: None, no_matplotlib: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    done = kvbuild("bench", cpu_bundle, "--device", "cpu", "--quick")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    (head,) = (line for line in lines if line.startswith("workload "))
    assert head.split("  ")[-1].strip() == "reading/kvbuild" and "PyTorch eager us" in head
    assert any(line.startswith("prefill-1x256-c128 ") for line in lines)
    (why,) = (line for line in lines if line.startswith("not measured here: "))
    callers = "PyTorch in a graph, torch.compile, Triton JIT and whole window, two kernels"
    assert why == f"not measured here: {callers}, which are timed as replays of a GPU's graph"
    assert "no plot was drawn" in done.out and lines[-1] == "artifacts/bench/bench.json: written"


def test_a_plot_is_drawn(kvbuild: Run, cpu_bundle: Path, small: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from kvbuild.aot.plot import draw

    done = kvbuild("bench", cpu_bundle, "--device", "cpu", "--quick", "--json", "-o", tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    picture = (tmp_path / "bench.svg").read_text()
    assert picture.startswith("<?xml")
    again = draw(json.loads(done.out))
    assert again["svg"].decode() == picture, "the same numbers give the same picture"


def test_wrong_bytes_are_code_1(
    kvbuild: Run, cpu_bundle: Path, small: None, no_matplotlib: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    real = runtime.load

    def load(*arguments: Any, **keywords: Any) -> Any:
        operator = real(*arguments, **keywords)
        right = operator.compress

        def spoiled(*operands: Any) -> Any:
            result = right(*operands)
            operands[8][0, :] ^= 1
            return result

        operator.compress = spoiled
        return operator

    monkeypatch.setattr(runtime, "load", load)
    done = kvbuild("bench", cpu_bundle, "--device", "cpu", "--quick", "-o", tmp_path)
    assert done.code == 1 and "prefill-1x256-c128: " in done.err and "wrong bytes by kvbuild" in done.err


def test_wrong_requests(
    kvbuild: Run, cpu_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for arguments, words in (
        ([], "wanted a readable file, found nothing at artifacts/kvcompress.kvb"),
        ([cpu_bundle, "-o", "file"], "-o file: wanted a folder"),
        ([cpu_bundle, "--device", "banana"], "--device: wanted cpu"),
    ):
        done = kvbuild("bench", *arguments)
        assert done.code == 2 and words in done.err


def test_the_whole_benchmark_is_the_contracts() -> None:
    names = [workload.name for workload in versus.Effort(quick=False).workloads()]
    assert names[:12] == [workload.name for workload in WORKLOADS]
    assert names[12:] == [f"decode-{n}-c{ratio}" for ratio in (128, 256, 512) for n in (1, 3, 8, 32)]
    assert len(versus.Effort(quick=True).workloads()) == 7
