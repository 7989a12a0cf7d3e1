"""What the compiler makes of the kernels for sm_90, of the Gluon ones too, which nothing can interpret."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvbuild.aot import plan as planning
from kvbuild.aot import spec, toolchain, tuning
from kvbuild.aot.plan import Plan, PlannedKernel
from kvbuild.aot.pool import request_for
from kvbuild.aot.spec import TargetName
from kvbuild.aot.targets import nvidia
from kvbuild.kernels import contract

SCRIPT = Path(__file__).with_name("compiler.py")
KERNELS = Path(contract.__file__).parent
SM_90 = TargetName("nvidia", "sm_90")
FUSED_ON_PURPOSE = "fused-on-purpose"


def planned(versions: Mapping[str, str]) -> Plan:
    facts = planning.Facts(
        tables={SM_90: tuning.load("nvidia", "sm_90")},
        versions={"nvidia": versions},
        commands={},
        zig="",
        cpu_sources=(),
        read=lambda path: (KERNELS / path).read_text(),
        recipe="",
    )
    return planning.plan(spec.load(spec.PACKAGED), [SM_90], facts)


def of_ratio_128(plan: Plan) -> dict[str, PlannedKernel]:
    return {kernel.name: kernel for kernel in plan.targets[0].kernels if kernel.ratio == 128}


# Names alone: what is installed is asked only when something is compiled.
NAMED = of_ratio_128(planned({"triton": "", "ptxas": ""}))
CLUSTERS = [name for name, kernel in NAMED.items() if kernel.form.function == "compress_cluster"]
STREAMS = [name for name, kernel in NAMED.items() if kernel.form.function == "compress_stream"]


@dataclass(frozen=True)
class Binary:
    """A compiled kernel and the worker's answer."""

    kernel: PlannedKernel
    ptx: str
    cubin: bytes
    facts: dict[str, Any]

    @property
    def load_widths(self) -> set[int]:
        """Bytes that one thread reads from global memory at once, asynchronous copies included."""
        return copy_widths(self.ptx) | access_widths("ld", self.ptx)

    @property
    def store_widths(self) -> set[int]:
        return access_widths("st", self.ptx)


def copy_widths(ptx: str) -> set[int]:
    return {int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, (0x\w+)", ptx)}


def access_widths(what: str, ptx: str) -> set[int]:
    found = re.findall(rf"\b{what}\.global(?:\.v(\d))?\.[a-z](\d+)", ptx)
    return {int(count or 1) * int(bits) // 8 for count, bits in found}


def contractible(ptx: str) -> dict[str, int]:
    """Float instructions that are fused, or that ptxas may fuse because they name no rounding."""
    return Counter(re.findall(r"\b(?:fma(?:\.\w+)*|(?:mul|add|sub)(?:\.ftz)?)\.f32\b", ptx))


@pytest.fixture(scope="session")
def binaries(session_folder: Path) -> dict[str, Binary]:
    """Every sm_90 kernel of ratio 128 by name, and one more with contraction on; compiled once a session."""
    plan = planned(toolchain.probe("nvidia", {}, os.environ).versions)
    kernels = of_ratio_128(plan)
    first = kernels[CLUSTERS[0]]
    fused = {**dict(first.unit.options), "enable_fp_fusion": True}
    kernels[FUSED_ON_PURPOSE] = replace(
        first, unit=replace(first.unit, options=tuple(sorted(fused.items())))
    )
    folder = session_folder / "sm_90"
    folder.mkdir(exist_ok=True)
    answers = folder / "answers"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answers.exists():
            requests = [
                json.dumps(request_for(each.unit, plan.sources)) + "\n" for each in kernels.values()
            ]
            done = subprocess.run(
                [sys.executable, str(SCRIPT)], input="".join(requests), capture_output=True, text=True,
                env=toolchain.clean_environment(os.environ),
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            answers.write_text(done.stdout)
    found = {}
    lines = answers.read_text().splitlines()
    for (name, kernel), line in zip(kernels.items(), lines, strict=True):
        facts = json.loads(line)
        assert facts["ok"], facts["error"]
        found[name] = Binary(kernel, facts["ptx"], base64.b64decode(facts["binary"]), facts)
    return found


def test_the_gluon_kernels_are_shipped_for_the_aligned_layout() -> None:
    assert CLUSTERS and STREAMS
    assert {NAMED[name].layout for name in (*CLUSTERS, *STREAMS)} == {"aligned"}


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_has_a_block_for_each_group_of_dimensions(binaries: Any, name: str) -> None:
    binary = binaries[name]
    blocks = contract.HEAD_DIM // NAMED[name].tile.block_d
    assert re.findall(r"\.reqnctapercluster\s+(\d+)", binary.ptx) == [str(blocks)]
    assert ".explicitcluster" in binary.ptx
    assert re.findall(r"\.reqntid\s+(\d+)", binary.ptx) == [str(32 * NAMED[name].tile.num_warps)]
    assert binary.facts["num_ctas"] == blocks
    # The squares travel through distributed shared memory, and no block leaves before the others have read.
    assert "ld.shared::cluster" in binary.ptx
    assert binary.ptx.count("barrier.cluster.arrive") == binary.ptx.count("barrier.cluster.wait") >= 2


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_row_of_a_cluster_comes_by_copies_of_16_bytes(binaries: Any, name: str) -> None:
    binary, tile = binaries[name], NAMED[name].tile
    assert copy_widths(binary.ptx) == {16}
    # Values and scores of a leaf of each part, block_d dimensions, 4 a copy, for each thread. Before the loop
    # the leaves that fill the ring, in it one more, if there is one.
    leaf = 2 * 4 * 8 * tile.block_d // 4 // (32 * tile.num_warps)
    leaves = 128 // 8 // 4
    filled = min(tile.num_stages, leaves)
    assert len(re.findall(r"cp\.async\.cg\.", binary.ptx)) == leaf * (filled + (leaves > filled))
    # A ring of four rows a stage, 4 bytes each of values and scores, and the exchange of squares.
    ring = tile.num_stages * 4 * 8 * 2 * tile.block_d * 4
    assert ring <= binary.facts["shared"] <= ring + 1024


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_keeps_whole_pages_in_shared_memory(binaries: Any, name: str) -> None:
    binary, tile = binaries[name], NAMED[name].tile
    assert copy_widths(binary.ptx) == {16}
    assert "reqnctapercluster" not in binary.ptx
    ring = tile.num_stages * 8 * contract.STATE_WIDTH * 4
    assert ring <= binary.facts["shared"] <= ring + 4096


@pytest.mark.parametrize("name", NAMED)
def test_nothing_is_spilled(binaries: Any, name: str) -> None:
    binary = binaries[name]
    resources = nvidia.resources(binary.cubin, binary.facts["entry"])
    # Outside of the fast path a few registers are let pass; a spilled tile would be hundreds of bytes.
    assert resources["spill_bytes"] <= (0 if NAMED[name].layout == "aligned" else 64)
    assert resources["registers"] * 32 * NAMED[name].form.num_warps <= 65536
    assert not re.search(r"\b(ld|st)\.local\b", binary.ptx)


@pytest.mark.parametrize("name", NAMED)
def test_multiply_and_add_stay_apart(binaries: Any, name: str) -> None:
    ptx = binaries[name].ptx
    assert contractible(ptx) == {}
    assert ".ftz" not in ptx
    if "finalize" not in name:
        assert len(re.findall(r"\bmul\.rn\.f32\b", ptx)) > 20
        assert len(re.findall(r"\badd\.rn\.f32\b", ptx)) > 10
    if "scan" not in name:
        assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx


def test_the_check_sees_contraction_where_it_is_on(binaries: Any) -> None:
    found = contractible(binaries[FUSED_ON_PURPOSE].ptx)
    assert sum(found.values()) > 50, found


@pytest.mark.parametrize("name", NAMED)
def test_accesses_are_as_wide_as_the_layout_allows_and_no_wider(binaries: Any, name: str) -> None:
    binary = binaries[name]
    if NAMED[name].layout == "aligned":
        assert 16 in binary.load_widths
        assert max(binary.store_widths) >= 8
        return
    # Addresses of 4 bytes for floats, 8 for int64 scalars, 2 for kv_cache and bf16 weights: nothing more.
    assert copy_widths(binary.ptx) <= {4}
    assert not re.search(r"\b(ld|st)\.global\.v", binary.ptx)
    assert binary.load_widths <= {2, 4, 8}
    assert binary.store_widths <= ({4} if "scan" in name else {1, 2})
