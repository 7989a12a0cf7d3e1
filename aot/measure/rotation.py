"""Inputs in turn, together larger than any cache, so that a call never finds its windows there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.contract import STATE_WIDTH
from ...kernels.workloads import Inputs, Workload, make

# More than any L2, so that a rotation over so much finds nothing there.
COLD_BYTES = 256 << 20


def cold_sets(workload: Workload, cold_bytes: int = COLD_BYTES) -> int:
    """How many distinct inputs of this workload are together no smaller than `cold_bytes`; at least 2."""
    return max(2, -(-cold_bytes // workload.window_bytes))


def rotation(workload: Workload, device: torch.device, sets: int) -> tuple[list[Inputs], Tensor]:
    """`sets` launches alike whose windows lie in different pages of one state cache, and that state cache.

    Pages are in random order over all of it; the last one holds NaN and belongs to no window.
    """
    base = make(workload, device=device)
    table = base.block_table.cpu().long()
    pages = base.state_cache.shape[0] - 2
    block_size = base.block_size
    base = base.with_(state_cache=base.state_cache[:1].clone())
    pool = torch.randn(sets * pages + 1, block_size, STATE_WIDTH, device=device,
                       generator=torch.Generator(device=device).manual_seed(0))  # fmt: skip
    pool[-1] = torch.nan
    order = torch.randperm(sets * pages, generator=torch.Generator().manual_seed(0))
    found = []
    for at in range(sets):
        moved = torch.full_like(table, sets * pages)
        held = table < pages
        moved[held] = order[table[held] + at * pages]
        found.append(base.with_(state_cache=pool, block_table=moved.to(torch.int32).to(device)).fresh())
    return found, pool


def slices(pool: Tensor, workload: Workload, sets: int) -> list[Tensor]:
    """The pool of `rotation` as `sets` contiguous float32 [n], each of as many bytes as the windows have."""
    return list(pool.flatten().split(workload.window_bytes // 4)[:sets])


@dataclass(frozen=True)
class Windows:
    """Many windows of one ratio in shuffled pages, of which launches of any size take some in turn.

    inputs: one request whose every window is an output.
    """

    inputs: Inputs

    @classmethod
    def make(cls, ratio: int, count: int, device: torch.device) -> Windows:
        return cls(make(Workload(1, count * ratio, ratio), device=device))

    @property
    def count(self) -> int:
        return int(self.inputs.boundary_token_indices.shape[0])

    @property
    def window_bytes(self) -> int:
        return self.inputs.compress_ratio * STATE_WIDTH * 4

    def sets(self, outputs: int, cold_bytes: int) -> int:
        """How many launches of that many outputs come to `cold_bytes`, as far as the windows reach."""
        return max(1, min(self.count // outputs, -(-cold_bytes // (outputs * self.window_bytes))))

    def launches(self, outputs: int, sets: int) -> list[Inputs]:
        """`sets` launches of `outputs` outputs each; together they take each window at most once."""
        boundaries = self.inputs.boundary_token_indices
        return [
            self.inputs.with_(boundary_token_indices=boundaries[at * outputs : (at + 1) * outputs])
            for at in range(sets)
        ]

    def reads(self, outputs: int, sets: int) -> list[Tensor]:
        """Contiguous float32 [n]: as many bytes as those launches read, in as many pieces."""
        flat = self.inputs.state_cache.flatten()
        size = outputs * self.window_bytes // 4
        return [flat[at * size : (at + 1) * size] for at in range(sets)]
