"""Launches the plain Triton kernels under Triton's interpreter, which a process of its own runs."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbuild.aot import plan as planning
from kvbuild.aot import spec, targets, tuning
from kvbuild.aot.plan import Plan
from kvbuild.aot.spec import TargetName
from kvbuild.kernels.contract import HEAD_DIM, OPERANDS, SPECIALISED_BLOCK_SIZE
from kvbuild.kernels.gpgpu import route
from kvbuild.kernels.gpgpu.route import KernelForm, Tile
from kvbuild.kernels.oracle import expect
from kvbuild.kernels.verdict import changed_outside, judge
from kvbuild.kernels.workloads import Inputs

SCRIPT = Path(__file__).with_name("interpreter.py")
ONE_LAUNCH = Tile(4, HEAD_DIM, 1, 4, 1)
GPGPU_TARGETS = [
    (vendor, arch)
    for vendor in targets.names()
    for arch in targets.load(vendor).ARCHS
    if targets.load(vendor).ROUTE == "gpgpu"
]

def stride(tensor: Tensor, dim: int) -> int:
    """As the launcher passes it: the stride of an extent of 0 or 1 says nothing."""
    return tensor.stride(dim) if tensor.shape[dim] > 1 else 0


def operands(x: Inputs, scratch: Tensor) -> dict[str, Any]:
    """The arguments of a kernel by the names of route.ARGS, as the launcher fills them in."""
    state, table, angles, kv = x.state_cache, x.block_table, x.cos_sin_cache, x.kv_cache
    tensors = {operand.name: getattr(x, operand.name) for operand in OPERANDS}
    return {
        **tensors,
        # Kernels take the weight's address as that of bf16 values, whatever it holds.
        "rms_norm_weight": x.rms_norm_weight.view(torch.bfloat16),
        "scratch": scratch,
        "num_blocks": state.shape[0],
        "state_page_stride": stride(state, 0),
        "state_row_stride": stride(state, 1),
        "block_size": x.block_size,
        "num_tokens": x.positions.shape[0],
        "num_outputs": x.boundary_token_indices.shape[0],
        "num_reqs": table.shape[0],
        "blocks_per_req": table.shape[1],
        "block_table_stride": stride(table, 0),
        "max_pos": angles.shape[0],
        "cos_sin_stride": stride(angles, 0),
        "kv_pages": kv.shape[0],
        "kv_page_stride": stride(kv, 0),
        "weight_is_fp32": int(x.rms_norm_weight.dtype == torch.float32),
        "rms_norm_eps": x.rms_norm_eps,
    }


def layouts(x: Inputs) -> tuple[str, ...]:
    """The layouts that the launcher may take for these operands."""
    return route.LAYOUTS if _aligned(x) else ("general",)


def _aligned(x: Inputs) -> bool:
    given = operands(x, torch.empty(0))
    values = (given[field] for field in route.ALIGNED_FIELDS if field != "scratch")
    return (
        x.block_size == SPECIALISED_BLOCK_SIZE
        and x.rms_norm_weight.dtype == torch.bfloat16
        and all((v.data_ptr() if isinstance(v, Tensor) else v) % 16 == 0 for v in values)
    )


@dataclass(frozen=True)
class Launched:
    """What a launch left: the operands with their kv_cache, and the scratch, fp32 [n]."""

    inputs: Inputs
    scratch: Tensor

    @property
    def bytes(self) -> bytes:
        """All memory that kv_cache is a view of."""
        return self.inputs.kv_storage.numpy().tobytes()


@pytest.fixture(scope="session")
def shipped() -> Plan:
    """The plan of every GPGPU target of the packaged build.yaml, as if for these versions of the tools."""
    versions = {"triton": "3.9.0", "ptxas": "12.9.86", "ptxas-blackwell": "13.4.59"}
    names = [TargetName(*name) for name in GPGPU_TARGETS]
    facts = planning.Facts(
        tables={name: tuning.load(name.vendor, name.arch) for name in names},
        versions={
            vendor: dict.fromkeys(targets.load(vendor).TOOLS, "1") | versions for vendor in targets.names()
        },
        commands={},
        zig="0.17",
        cpu_sources=(),
        read=lambda path: f"text of {path}",
        recipe="r",
    )
    return planning.plan(spec.load(spec.PACKAGED), names, facts)


class Interpreter:
    """The process, started when it is first needed."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with open(log, "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def ask(self, request: object) -> Any:
        assert self.process.stdin and self.process.stdout
        data = io.BytesIO()
        torch.save(request, data)
        try:
            self.process.stdin.write(struct.pack("<q", data.tell()) + data.getvalue())
            self.process.stdin.flush()
            (length,) = struct.unpack("<q", self.process.stdout.read(8))
        except (OSError, struct.error):
            raise AssertionError(f"the interpreter ended:\n{self.log.read_text()[-4000:]}") from None
        return torch.load(io.BytesIO(self.process.stdout.read(length)), weights_only=False)

    layouts = staticmethod(layouts)

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()

    def launch(
        self, x: Inputs, forms: Sequence[KernelForm], scratch: Tensor, maker: str | None = None
    ) -> Launched:
        """Launches the kernels on a copy of kv_cache. maker: odd_cases' function that made x's state."""
        count = x.boundary_token_indices.shape[0]
        kernels = [(form.function, count * form.per_output, dict(form.constexprs)) for form in forms]
        given = operands(x, scratch)
        if maker is not None:
            given["state_cache"] = None
        kind, *found = self.ask((kernels, given, maker))
        assert kind == "done", found[0]
        kv_cache, scratch = found
        storage = torch.empty(0, dtype=torch.uint8).set_(kv_cache.untyped_storage())
        return Launched(replace(x, kv_cache=kv_cache, kv_storage=storage), scratch)

    def run(self, x: Inputs, layout: str, tile: Tile = ONE_LAUNCH, maker: str | None = None) -> Launched:
        """What a variant of this layout and tile leaves; scratch holds NaN before."""
        size = x.boundary_token_indices.shape[0] * route.scratch_per_output(tile) // 4
        forms = route.kernels_for(x.compress_ratio, layout, tile)
        return self.launch(x, forms, torch.full((size,), torch.nan), maker)

    def check(self, x: Inputs, layout: str, tile: Tile = ONE_LAUNCH, maker: str | None = None) -> Launched:
        """The same, and every byte is the oracle's, or an accepted tie, or unchanged."""
        found = self.run(x, layout, tile, maker)
        verdict = judge(found.inputs.kv_cache, x.kv_cache, expect(*x.call_args()))
        assert verdict.right, str(verdict)
        assert changed_outside(found.inputs.kv_storage, x.kv_storage, x.kv_cache) == 0
        return found


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    """Runs kernels without a device; slow: about a quarter of a second for an output of ratio 128."""
    running = Interpreter(tmp_path_factory.mktemp("interpreter") / "stderr")
    yield running
    running.close()
