"""Runs the Ascend pipeline's stages under Triton's interpreter, in a process of its own."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbuild.kernels.ascend import pipeline
from kvbuild.kernels.contract import OPERANDS, SPECIALISED_BLOCK_SIZE, STATE_WIDTH
from kvbuild.kernels.oracle import expect
from kvbuild.kernels.verdict import changed_outside, judge
from kvbuild.kernels.workloads import Inputs

SCRIPT = Path(__file__).with_name("interpreter.py")
DTYPES = {
    "i8": torch.int8, "u8": torch.uint8, "i16": torch.int16, "i32": torch.int32, "fp32": torch.float32,
    "i64": torch.int64,
}  # fmt: skip
CORES = 3


def stride(tensor: Tensor, dim: int) -> int:
    """As the launcher passes it: the stride of an extent of 0 or 1 says nothing."""
    return tensor.stride(dim) if tensor.shape[dim] > 1 else 0


def fields(x: Inputs) -> dict[str, Any]:
    """The values of kvb_operands for a call."""
    state, table, angles, kv = x.state_cache, x.block_table, x.cos_sin_cache, x.kv_cache
    return {
        **{operand.name: getattr(x, operand.name) for operand in OPERANDS},
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
    """The layouts of pipeline.LAYOUTS that these operands have."""
    state = x.state_cache
    dense = state.is_contiguous() and 1 <= state.shape[0] * state.shape[1] < 1 << 31
    aligned = x.block_size == SPECIALISED_BLOCK_SIZE and x.rms_norm_weight.dtype == torch.bfloat16
    return (*(("aligned",) if aligned else ()), *(("dense",) if dense else ()), "general")


ROUTE_OF = {"aligned": "block", "dense": "index_select", "general": "block"}


@dataclass(frozen=True)
class Launched:
    """What a call left: the operands with their kv_cache, and the last chunk's intermediates by name."""

    inputs: Inputs
    memory: dict[str, Any]

    @property
    def bytes(self) -> bytes:
        """All memory that kv_cache is a view of."""
        return self.inputs.kv_storage.numpy().tobytes()


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

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()

    layouts = staticmethod(layouts)

    def stages(
        self, stages: tuple[pipeline.Stage, ...], memory: dict[str, Any], cores: int = CORES,
        maker: str | None = None,
    ) -> dict[str, Any]:
        """Runs stages on this memory, by field; what they leave there."""
        outputs = memory["num_outputs"]
        asked = [
            (
                stage.source if stage.kind == "triton" else None,
                stage.function,
                pipeline.grid(stage, outputs, cores),
                dict(stage.constexprs),
                [(argument.field, argument.type) for argument in stage.arguments],
            )
            for stage in stages
        ]
        kind, found = self.ask((asked, {**memory, **({"state_cache": None} if maker else {})}, maker))
        assert kind == "done", found
        return {**found, "state_cache": memory["state_cache"]}

    def run(
        self, x: Inputs, layout: str, block_d: int = 512, chunk: int = 1 << 30, cores: int = CORES,
        maker: str | None = None,
    ) -> Launched:
        """What a call leaves, `chunk` outputs at a time; intermediates hold nonsense before."""
        route = ROUTE_OF[layout]
        stages = pipeline.stages(route, x.compress_ratio, layout, block_d)
        memory = fields(x)
        for first in range(0, x.boundary_token_indices.shape[0], chunk):
            boundary = x.boundary_token_indices[first : first + chunk].clone()
            memory |= {"boundary_token_indices": boundary, "num_outputs": boundary.shape[0]}
            memory |= scratch(route, x.compress_ratio, boundary.shape[0])
            memory = self.stages(stages, memory, cores, maker)
        kv_cache = memory["kv_cache"]
        storage = torch.empty(0, dtype=torch.uint8).set_(kv_cache.untyped_storage())
        return Launched(replace(x, kv_cache=kv_cache, kv_storage=storage), memory)

    def check(self, x: Inputs, layout: str, **options: Any) -> Launched:
        """The same, and every byte is the oracle's, or an accepted tie, or unchanged."""
        found = self.run(x, layout, **options)
        verdict = judge(found.inputs.kv_cache, x.kv_cache, expect(*x.call_args()))
        assert verdict.right, str(verdict)
        assert changed_outside(found.inputs.kv_storage, x.kv_storage, x.kv_cache) == 0
        return found


def scratch(route: str, ratio: int, outputs: int) -> dict[str, Tensor]:
    """Intermediates of a chunk, full of what no stage may take for its own result."""
    made = {}
    for each in pipeline.intermediates(route, ratio):
        shape = (outputs, *each.shape)
        if each.name == "gathered":
            shape = (outputs * ratio, STATE_WIDTH)
        elif each.name == "rows":
            shape = (outputs * ratio,)
        dtype = DTYPES[each.dtype]
        filler = float("nan") if dtype.is_floating_point else 77
        made[each.name] = torch.full(shape, filler, dtype=dtype)
    return made


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    """Runs stages without a device."""
    running = Interpreter(tmp_path_factory.mktemp("interpreter") / "stderr")
    yield running
    running.close()
