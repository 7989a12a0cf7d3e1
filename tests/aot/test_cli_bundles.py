"""The commands that read bundles: list, inspect, verify, merge."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbuild.aot import bundle
from kvbuild.aot.cli.inspect import driver_text
from kvbuild.runtime.bundle import open_bundle
from kvbuild.runtime.manifest import Manifest, launch_table_digest

Run = Callable[..., Any]

LAUNCHER = b"\x7fELF a launcher, as far as these commands care"
CUBIN = b"no ELF file at all"
HOST = "x86_64-linux-gnu.2.17"


def gpu_bundle(path: Path, arch: str = "sm_90", cubin: bytes = CUBIN) -> Path:
    """Writes a bundle with one NVIDIA target; its blobs are not real."""
    blobs = {hashlib.sha256(content).hexdigest(): content for content in (LAUNCHER, cubin)}
    launcher, binary = blobs
    kernel = {
        "name": "compress_fused-c128-general-t4d512s1w4n3",
        "entry": "compress_fused",
        "ratio": 128,
        "layout": "general",
        "tile": {
            "block_t": 4,
            "block_d": 512,
            "split": 1,
            "num_warps": 4,
            "num_stages": 3,
            "cluster": False,
        },
        "blob": binary,
        "num_warps": 4,
        "cluster": 1,
        "shared": 24576,
        "args": [{"field": "state_cache", "type": "*fp32", "offset": 0, "size": 8}],
        "hidden": 2,
        "global_scratch": 0,
        "profile_scratch": 0,
        "constexprs": {"RATIO": 128},
        "assumes": {"block_size": 0, "alignment": 0},
        "grid": {"per_output": 1, "y": 1},
    }
    variant = {
        "ratio": 128,
        "layout": "general",
        "max_outputs": None,
        "kernels": [kernel["name"]],
        "scratch_per_output": 0,
    }
    target: dict[str, Any] = {
        "vendor": "nvidia",
        "arch": arch,
        "route": "gpgpu",
        "warp_size": 32,
        "elf_machine": 190,
        "min_driver": 12080,
        "toolchain": {"triton": "3.9.0", "ptxas": "12.9.86", "zig": "0.17.1"},
        "numerics": {"fp_fusion": False, "denormals": "preserve"},
        "source_digest": "0" * 64,
        "launchers": {HOST: launcher},
        "launch_table": "",
        "kernels": [kernel],
        "variants": [variant],
    }
    target["launch_table"] = _table_digest(kernel, variant)
    manifest = Manifest.from_json(
        {
            "schema": 1,
            "kvbuild": "0.1.0",
            "operator": "c128_256_512_compress",
            "targets": [target],
            "blobs": {name: len(content) for name, content in blobs.items()},
        }
    )
    bundle.write(path, manifest, blobs)
    return path


def _table_digest(kernel: dict[str, Any], variant: dict[str, Any]) -> str:
    from kvbuild.runtime.manifest import Kernel, Variant
    from kvbuild.runtime.strictjson import Node

    return launch_table_digest((Kernel.read(Node(kernel, "")),), (Variant.read(Node(variant, "")),))


def test_what_is_said_in_words_is_repeated(
    gpu: Path, host_arch: str, tmp_path: Path, kvbuild: Run
) -> None:
    words = {"evidence": "never loaded", "tiles": "reasoned, not measured"}
    with open_bundle(gpu) as opened:
        value, blobs = opened.manifest.to_json(), {name: opened.read(name) for name in opened.manifest.blobs}
    value["targets"][0]["toolchain"] |= words
    path = tmp_path / "told.kvb"
    bundle.write(path, Manifest.from_json(value), blobs)
    text = kvbuild("inspect", path).out
    assert "  toolchain     ptxas 12.9.86, triton 3.9.0, zig 0.17.1\n  evidence      never loaded\n" in text
    assert "  tiles         reasoned, not measured\n" in text
    assert kvbuild("list", path).out.endswith("\nnvidia:sm_90: never loaded\n")
    (target,) = json.loads(kvbuild("list", path, "--json").out)["targets"]
    assert {name: target[name] for name in words} == words
    facts = {"index": 0, "driver": 13000, "driver_library": "", "host": "x86_64", "libc": "2.36", "name": "x"}
    facts |= {"marks": {"api": "cuda", "name": "NVIDIA H200", "capability": "9.0"}}
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    explain = ("explain", path, "--facts", tmp_path / "facts.json")
    assert kvbuild(*explain).out.endswith("\nnvidia:sm_90: never loaded\n")
    assert json.loads(kvbuild(*explain, "--json").out)["evidence"] == "never loaded"
    assert "sm_90: " not in kvbuild("list", gpu).out


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    return gpu_bundle(tmp_path / "gpu.kvb")


def test_list_names_targets_hosts_and_sizes(gpu: Path, kvbuild: Run) -> None:
    text = kvbuild("list", gpu)
    assert text.code == 0
    assert "nvidia:sm_90" in text.out and "x86_64" in text.out and str(gpu) in text.out
    found = json.loads(kvbuild("list", gpu, "--json").out)
    (target,) = found["targets"]
    assert (target["target"], target["ratios"], target["layouts"]) == ("nvidia:sm_90", [128], ["general"])
    assert (target["kernels"], target["variants"], target["hosts"]) == (1, 1, [HOST])
    assert target["size"] == len(LAUNCHER) + len(CUBIN)
    assert found["size"] == gpu.stat().st_size


def test_inspect_shows_everything(gpu: Path, kvbuild: Run) -> None:
    text = kvbuild("inspect", gpu)
    assert text.code == 0
    for words in (
        "ptxas 12.9.86",
        "CUDA 12.8 or newer",
        "fusion off",
        "t4 d512 s1 n3",
        "24,576",
        "compress_fused-c128-general-t4d512s1w4n3",
        HOST,
    ):
        assert words in text.out
    found = json.loads(kvbuild("inspect", gpu, "--json").out)
    assert found["manifest"]["targets"][0]["kernels"][0]["hidden"] == 2
    assert list(found["resources"].values()) == [None]


@pytest.mark.parametrize(
    ("vendor", "version", "words"),
    [
        ("cpu", 0, "none needed"),
        ("amd", 0, "any"),
        ("nvidia", 13000, "CUDA 13.0 or newer"),
        ("other", 7, "7 or newer"),
    ],
)
def test_drivers_in_words(vendor: str, version: int, words: str) -> None:
    assert driver_text(vendor, version) == words


def test_verify_accepts_a_whole_bundle(gpu: Path, kvbuild: Run) -> None:
    done = kvbuild("verify", gpu)
    assert done.code == 0 and "ok" in done.out and "2 blobs" in done.out
    found = json.loads(kvbuild("verify", gpu, "--json").out)
    assert found["ok"] and [entry["ok"] for entry in found["entries"]] == [True, True]


def test_verify_names_each_damaged_entry_and_who_uses_it(gpu: Path, kvbuild: Run) -> None:
    content = bytearray(gpu.read_bytes())
    content[content.index(CUBIN)] ^= 1
    gpu.write_bytes(content)
    damaged = hashlib.sha256(CUBIN).hexdigest()
    text = kvbuild("verify", gpu)
    assert text.code == 1
    assert damaged in text.out and "nvidia:sm_90" in text.out and "1 of 2 entries damaged" in text.out
    done = kvbuild("verify", gpu, "--json")
    found = json.loads(done.out)
    assert done.code == 1 and not found["ok"]
    assert [entry["entry"] for entry in found["entries"] if not entry["ok"]] == [damaged]


def test_merge_makes_one_of_several(tmp_path: Path, kvbuild: Run) -> None:
    one = gpu_bundle(tmp_path / "one.kvb", "sm_80")
    other = gpu_bundle(tmp_path / "other.kvb", "sm_90", CUBIN + b"!")
    out = tmp_path / "all.kvb"
    done = kvbuild("merge", one, other, "-o", out, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [target["target"] for target in found["targets"]] == ["nvidia:sm_80", "nvidia:sm_90"]
    assert kvbuild("verify", out).code == 0
    again = tmp_path / "again.kvb"
    assert kvbuild("merge", other, one, "-o", again).code == 0
    assert again.read_bytes() == out.read_bytes()


def test_merge_refuses_what_differs_and_what_cannot_be_written(tmp_path: Path, kvbuild: Run) -> None:
    one = gpu_bundle(tmp_path / "one.kvb")
    other = gpu_bundle(tmp_path / "other.kvb", cubin=CUBIN + b"!")
    out = tmp_path / "all.kvb"
    done = kvbuild("merge", one, other, "-o", out)
    assert done.code == 2 and "nvidia:sm_90" in done.err and not out.exists()
    assert kvbuild("merge", one, "-o", tmp_path).code == 2
    assert kvbuild("merge", one, tmp_path / "none.kvb", "-o", out).code == 2


def test_the_cpu_bundle_reads_well(cpu_bundle: Path, host_arch: str, kvbuild: Run) -> None:
    assert f"cpu:{host_arch}" in kvbuild("list", cpu_bundle).out
    assert "none needed" in kvbuild("inspect", cpu_bundle).out
    assert kvbuild("verify", cpu_bundle).code == 0
