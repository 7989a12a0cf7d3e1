"""Which state rows an output reads, whether it is written, and where: the contract's index rules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .contract import KV_BLOCK_SIZE


@dataclass(frozen=True)
class Windows:
    """The windows of all `num_outputs` outputs, padding included.

    written:       bool [num_outputs]; False: padding, a negative slot, an index outside its operand, or a
                   window without one live row. Nothing below means anything then, except `slot`.
    slot:          int64 [num_outputs]; -1 where the boundary index itself is outside the tokens.
    rope_position: int64 [num_outputs]; row of the cosine and sine cache.
    block, row:    int64 [num_outputs, C]; state page and row in it, 0 where not live.
    live:          bool [num_outputs, C]; False: the row is masked.
    """

    written: Tensor
    slot: Tensor
    rope_position: Tensor
    block: Tensor
    row: Tensor
    live: Tensor


def _at(table: Tensor, index: Tensor, inside: Tensor, missing: int) -> Tensor:
    if table.shape[0] == 0:
        return torch.full_like(index, missing)
    found = table[torch.where(inside, index, 0)].to(torch.int64)
    return torch.where(inside, found, missing)


def resolve(token_to_req: Tensor, positions: Tensor, boundary_token_indices: Tensor, block_table: Tensor,
            kv_slot_mapping: Tensor, *, num_blocks: int, block_size: int, compress_ratio: int,
            kv_pages: int, max_pos: int) -> Windows:
    """Resolves every index of a launch without reading outside any operand, whatever the indices say."""
    boundary = boundary_token_indices
    known = (boundary >= 0) & (boundary < token_to_req.shape[0])
    request = _at(token_to_req, boundary, known, -1)
    position = _at(positions, boundary, known, -1)
    slot = _at(kv_slot_mapping, boundary, known, -1)
    rope_position = torch.div(position, compress_ratio, rounding_mode="floor") * compress_ratio

    num_reqs, blocks_per_req = block_table.shape
    inside = (known & (request >= 0) & (request < num_reqs) & (slot >= 0) & (slot < kv_pages * KV_BLOCK_SIZE)
              & (rope_position >= 0) & (rope_position < max_pos))

    offsets = torch.arange(1 - compress_ratio, 1, device=boundary.device)
    t = torch.where(inside, position, -1)[:, None] + offsets
    column = torch.div(t, block_size, rounding_mode="floor")
    live = (t >= 0) & (column < blocks_per_req)
    if num_reqs and blocks_per_req:
        request = torch.where(inside, request, 0)[:, None]
        block = block_table[request, torch.where(live, column, 0)].to(torch.int64)
        live = live & (block >= 0) & (block < num_blocks)
    else:
        block, live = torch.zeros_like(t), torch.zeros_like(live)
    return Windows(
        written=inside & live.any(dim=1),
        slot=slot,
        rope_position=torch.where(inside, rope_position, 0),
        block=torch.where(live, block, 0),
        row=torch.where(live, t - column * block_size, 0),
        live=live,
    )
