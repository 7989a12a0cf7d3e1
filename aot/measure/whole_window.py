"""For comparison only: the shape of the fast kernels that are public. Two launches; one program holds a whole
window of a few dimensions in registers, and a second kernel finishes.

Its sums are not in the canonical order, so its bytes may differ from the operator's by rounding ties. Block
size 8 and aligned operands only; no bundle carries it.
"""

import triton
import triton.language as tl

from ...kernels.gpgpu.compress import locate
from ...kernels.gpgpu.finalize import HEAD_DIM, TILES, WIDTH, finish, load_rotation, load_weight, tile_sums
from ...kernels.gpgpu.scan import SCORE_OFFSET


@triton.jit
def whole_window_scan(
    state_cache, token_to_req, positions, boundary_token_indices, block_table, kv_slot_mapping, scratch,
    num_blocks, state_page_stride, state_row_stride, num_tokens, num_outputs, num_reqs, blocks_per_req,
    block_table_stride, max_pos, kv_pages, RATIO: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The weighted means of BLOCK_D dimensions of an output, to scratch [outputs, 512] fp32."""
    output = tl.program_id(0).to(tl.int64)
    request, position, rotary, slot, wanted = locate(
        output, boundary_token_indices, token_to_req, positions, kv_slot_mapping, num_tokens, num_outputs,
        num_reqs, max_pos, kv_pages, RATIO,
    )  # fmt: skip
    if wanted:
        time = position - (RATIO - 1) + tl.arange(0, RATIO)
        column = time >> 3
        inside = (time >= 0) & (column < blocks_per_req)
        page = tl.load(block_table + request * block_table_stride + column, mask=inside, other=-1)
        page = page.to(tl.int64)
        exists = (page >= 0) & (page < num_blocks)
        dim = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        rows = state_cache + page * state_page_stride + (time & 7) * state_row_stride
        tile = rows[:, None] + dim[None, :]
        score = tl.load(tile + SCORE_OFFSET, mask=exists[:, None], other=float("-inf"))
        value = tl.load(tile, mask=exists[:, None], other=0.0)
        weight = tl.exp(score - tl.max(score, axis=0)[None, :])
        mean = tl.sum(weight * value, axis=0) / tl.sum(weight, axis=0)
        tl.store(scratch + output * HEAD_DIM + dim, mean)


@triton.jit
def whole_window_finish(
    token_to_req, positions, boundary_token_indices, rms_norm_weight, cos_sin_cache, kv_slot_mapping,
    kv_cache, scratch, num_tokens, num_outputs, num_reqs, max_pos, cos_sin_stride, kv_pages, kv_page_stride,
    rms_norm_eps, RATIO: tl.constexpr,
):  # fmt: skip
    """One program finishes an output."""
    output = tl.program_id(0).to(tl.int64)
    request, position, rotary, slot, wanted = locate(
        output, boundary_token_indices, token_to_req, positions, kv_slot_mapping, num_tokens, num_outputs,
        num_reqs, max_pos, kv_pages, RATIO,
    )  # fmt: skip
    if wanted:
        dim = tl.arange(0, TILES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        weight = load_weight(rms_norm_weight, 0, dim, 8)
        cos, sin = load_rotation(cos_sin_cache, cos_sin_stride, rotary, dim)
        c = tl.load(scratch + output * HEAD_DIM + dim)
        finish(
            c, tile_sums(c * c), c == c, dim, slot, weight, cos, sin, kv_cache, kv_page_stride, rms_norm_eps
        )
