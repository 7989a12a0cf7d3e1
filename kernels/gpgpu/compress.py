"""The GPGPU route's kernels. One program computes one output, or one dimension group of it.

All take the arguments of route.ARGS in that order; nothing outside their tensors is read or written,
whatever the indices say.
"""

import triton
import triton.language as tl

from .finalize import (
    GROUPS,
    HEAD_DIM,
    KV_BLOCK_SIZE,
    TILES,
    WIDTH,
    finish,
    load_rotation,
    load_weight,
    tile_sums,
)
from .scan import SCAN_WIDTH, scan_window


@triton.jit
def locate(
    output, boundary_token_indices, token_to_req, positions, kv_slot_mapping, num_tokens, num_outputs,
    num_reqs, max_pos, kv_pages, RATIO: tl.constexpr,
):  # fmt: skip
    """Request, position, rotary position and slot of an output, and whether it is to be written."""
    token = tl.load(boundary_token_indices + output, mask=output < num_outputs, other=-1)
    wanted = (token >= 0) & (token < num_tokens)
    token = tl.where(wanted, token, 0)
    request = tl.load(token_to_req + token, mask=wanted, other=-1).to(tl.int64)
    position = tl.load(positions + token, mask=wanted, other=-1)
    slot = tl.load(kv_slot_mapping + token, mask=wanted, other=-1)
    rotary = (position // RATIO) * RATIO
    wanted = wanted & (request >= 0) & (request < num_reqs) & (position >= 0) & (rotary < max_pos)
    wanted = wanted & (slot >= 0) & (slot < kv_pages * KV_BLOCK_SIZE)
    return request, position, rotary, slot, wanted


@triton.jit
def compress_fused(
    state_cache, token_to_req, positions, boundary_token_indices, block_table, rms_norm_weight,
    cos_sin_cache, kv_slot_mapping, kv_cache, scratch, num_blocks, state_page_stride, state_row_stride,
    block_size, num_tokens, num_outputs, num_reqs, blocks_per_req, block_table_stride, max_pos,
    cos_sin_stride, kv_pages, kv_page_stride, weight_is_fp32, rms_norm_eps,
    RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program, or one cluster, owns an output: scan and finish in one launch, no scratch."""
    output = tl.program_id(0).to(tl.int64)
    request, position, rotary, slot, wanted = locate(
        output, boundary_token_indices, token_to_req, positions, kv_slot_mapping, num_tokens, num_outputs,
        num_reqs, max_pos, kv_pages, RATIO,
    )  # fmt: skip
    if wanted:
        dim = tl.arange(0, TILES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        # Loaded before the scan, so that their latency is not added to the tail.
        weight = load_weight(rms_norm_weight, weight_is_fp32, dim, BLOCK_SIZE)
        cos, sin = load_rotation(cos_sin_cache, cos_sin_stride, rotary, dim)
        scanned = tl.arange(0, GROUPS)[:, None] * SCAN_WIDTH + tl.arange(0, SCAN_WIDTH)[None, :]
        c, exists = scan_window(
            state_cache, block_table + request * block_table_stride, position, num_blocks,
            state_page_stride, state_row_stride, block_size, blocks_per_req, scanned, RATIO, BLOCK_SIZE,
            BLOCK_T, NUM_STAGES, GROUPS,
        )  # fmt: skip
        c = tl.reshape(c, (TILES, WIDTH))
        exists = tl.reshape(exists, (TILES, WIDTH))
        finish(
            c, tile_sums(c * c), exists, dim, slot, weight, cos, sin, kv_cache, kv_page_stride,
            rms_norm_eps,
        )  # fmt: skip


@triton.jit
def compress_scan(
    state_cache, token_to_req, positions, boundary_token_indices, block_table, rms_norm_weight,
    cos_sin_cache, kv_slot_mapping, kv_cache, scratch, num_blocks, state_page_stride, state_row_stride,
    block_size, num_tokens, num_outputs, num_reqs, blocks_per_req, block_table_stride, max_pos,
    cos_sin_stride, kv_pages, kv_page_stride, weight_is_fp32, rms_norm_eps,
    RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, NUM_STAGES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """First of two launches: a program scans BLOCK_D dimensions of an output into scratch [outputs, 512]."""
    SHARE: tl.constexpr = BLOCK_D // SCAN_WIDTH
    program = tl.program_id(0).to(tl.int64)
    output = program // (HEAD_DIM // BLOCK_D)
    request, position, rotary, slot, wanted = locate(
        output, boundary_token_indices, token_to_req, positions, kv_slot_mapping, num_tokens, num_outputs,
        num_reqs, max_pos, kv_pages, RATIO,
    )  # fmt: skip
    if wanted:
        dim = tl.arange(0, SHARE)[:, None] * SCAN_WIDTH + tl.arange(0, SCAN_WIDTH)[None, :]
        dim += (program % (HEAD_DIM // BLOCK_D)).to(tl.int32) * BLOCK_D
        c, exists = scan_window(
            state_cache, block_table + request * block_table_stride, position, num_blocks,
            state_page_stride, state_row_stride, block_size, blocks_per_req, dim, RATIO, BLOCK_SIZE,
            BLOCK_T, NUM_STAGES, SHARE,
        )  # fmt: skip
        # No window with a row in it yields -inf for want of a maximum: it tells the second launch.
        tl.store(scratch + output * HEAD_DIM + dim, tl.where(exists, c, float("-inf")))


@triton.jit
def compress_finalize(
    state_cache, token_to_req, positions, boundary_token_indices, block_table, rms_norm_weight,
    cos_sin_cache, kv_slot_mapping, kv_cache, scratch, num_blocks, state_page_stride, state_row_stride,
    block_size, num_tokens, num_outputs, num_reqs, blocks_per_req, block_table_stride, max_pos,
    cos_sin_stride, kv_pages, kv_page_stride, weight_is_fp32, rms_norm_eps,
    RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Second of two launches: one program finishes an output from scratch."""
    output = tl.program_id(0).to(tl.int64)
    request, position, rotary, slot, wanted = locate(
        output, boundary_token_indices, token_to_req, positions, kv_slot_mapping, num_tokens, num_outputs,
        num_reqs, max_pos, kv_pages, RATIO,
    )  # fmt: skip
    if wanted:
        row = scratch + output * HEAD_DIM
        dim = tl.arange(0, TILES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        weight = load_weight(rms_norm_weight, weight_is_fp32, dim, BLOCK_SIZE)
        cos, sin = load_rotation(cos_sin_cache, cos_sin_stride, rotary, dim)
        c = tl.load(row + dim)
        finish(
            c, tile_sums(c * c), c != float("-inf"), dim, slot, weight, cos, sin, kv_cache, kv_page_stride,
            rms_norm_eps,
        )  # fmt: skip
