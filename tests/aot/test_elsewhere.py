"""From a vendor's own Triton to a bundle, by the command line, with a stand-in for the vendor's fork."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import binaries
import fork
import harness
import pytest

from kvbuild.aot import spec, targets
from kvbuild.runtime.bundle import open_bundle


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """build.yaml with one ratio and this machine's host alone."""
    text = spec.PACKAGED.read_text()
    text = text.replace("compress_ratios: [128, 256, 512]", "compress_ratios: [256]")
    line = next(line for line in text.splitlines() if line.startswith("hosts:"))
    path = tmp_path / "build.yaml"
    path.write_text(text.replace(line, f"hosts: [{harness.host_triple()}]"))
    return path


# Vendor, arch, the version of its Triton, hidden pointers, its last stage, what its SDK brings, the variable
# that says where that is, and whether the last stage is a path.
FORKS = [
    (
        "hygon", "gfx936", "3.0.0", 0, "hsaco", ("triton/backends/hcu/compiler.py", "aillvm/bin/clang-18"),
        "ROCM_PATH", False,
    ),
    (
        "metax", "c500", "3.6.0", 2, "mcfatbin", ("triton/backends/metax/compiler.py", "mxgpu_llvm/bin/mxcc"),
        "MACA_PATH", False,
    ),
    (
        "mthreads", "mp_22", "3.1.0", 0, "mubin",
        ("triton/backends/mthreads/compiler.py", "triton/backends/mthreads/bin/llc"), "UNUSED", True,
    ),
    (
        "thead", "ppu001", "3.6.0", 2, "hgbin", ("triton/backends/ppu/compiler.py", "bin/ppu-llc"), "PPU_SDK",
        False,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("vendor", "arch", "version", "hidden", "stage", "files", "variable", "as_path"),
    FORKS,
    ids=[each[0] for each in FORKS],
)
def test_a_bundle_of_a_vendors_own_triton(
    vendor: str, arch: str, version: str, hidden: int, stage: str, files: tuple[str, ...], variable: str,
    as_path: bool, config: Path, tmp_path: Path, kvbuild: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    module = targets.load(vendor)
    python = fork.make(
        tmp_path / "fork", vendor, module.triton_target(arch), version, hidden, stage, files, as_path
    )
    monkeypatch.setenv(variable, str(tmp_path / "fork"))
    bundle = tmp_path / "made.kvb"
    wanted = ("compile", "--config", config, "--target", f"{vendor}:{arch}", "-o", bundle)
    before = kvbuild(*wanted)
    assert before.code == 3 and module.SDK in before.err
    assert not bundle.exists()

    monkeypatch.setenv(f"KVBUILD_TOOLCHAIN_{vendor.upper()}", str(python))
    done = kvbuild(*wanted)
    assert done.code == 0, done.err
    assert kvbuild("verify", bundle).code == 0
    with open_bundle(bundle) as opened:
        (target,) = opened.manifest.targets
        shipped = [opened.read(kernel.blob) for kernel in target.kernels]
    assert target.toolchain["triton"] == version
    assert target.elf_machine == binaries.MACHINES[vendor]
    assert {kernel.hidden for kernel in target.kernels} == {hidden}
    assert all(data.startswith(b"\x7fELF") for data in shipped)
    assert "never loaded" in target.toolchain["evidence"]
    shown = kvbuild("inspect", bundle)
    assert shown.code == 0 and target.toolchain["evidence"] in shown.out


def test_gfx906_says_how_far_it_came(config: Path, tmp_path: Path, kvbuild: Callable[..., Any]) -> None:
    """Built for real, by Triton's AMD backend."""
    bundle = tmp_path / "made.kvb"
    done = kvbuild("compile", "--config", config, "--target", "hygon:gfx906", "-o", bundle)
    assert done.code == 0, done.err
    evidence = "built by name with Triton's AMD backend; not loaded on DTK"
    assert evidence in kvbuild("inspect", bundle).out
    found = json.loads(kvbuild("inspect", bundle, "--json").out)
    (target,) = found["manifest"]["targets"]
    assert target["toolchain"]["evidence"] == evidence
    assert {kernel["hidden"] for kernel in target["kernels"]} == {2}
    assert all(used["registers"] > 0 for used in found["resources"].values())
