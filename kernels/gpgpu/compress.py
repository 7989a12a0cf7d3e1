"""The GPGPU route's kernels. One program computes one output, or a part of one output's window.

All take the arguments of route.ARGS in that order; nothing outside their tensors is read or written,
whatever the indices say.
"""

import triton
import triton.language as tl

from .finalize import HEAD_DIM, KV_BLOCK_SIZE, TILES, WIDTH, finish, load_rotation, load_weight, tile_sums
from .scan import merge, scan_rows

# A state in scratch: largest score, sum of weights, weighted sum; 512 fp32 each.
STATE = tl.constexpr(3 * 512)


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
    RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program owns an output: scan and finish in one launch, no scratch."""
    output = tl.program_id(0).to(tl.int64)
    request, position, rotary, slot, wanted = locate(
        output, boundary_token_indices, token_to_req, positions, kv_slot_mapping, num_tokens, num_outputs,
        num_reqs, max_pos, kv_pages, RATIO,
    )  # fmt: skip
    if wanted:
        top, weight, total = scan_rows(
            state_cache, block_table + request * block_table_stride, position - (RATIO - 1), num_blocks,
            state_page_stride, state_row_stride, block_size, blocks_per_req, tl.arange(0, HEAD_DIM), RATIO,
            BLOCK_SIZE, NUM_STAGES, 1, HEAD_DIM,
        )  # fmt: skip
        dim = tl.arange(0, TILES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        norm_weight = load_weight(rms_norm_weight, weight_is_fp32, dim, BLOCK_SIZE)
        cos, sin = load_rotation(cos_sin_cache, cos_sin_stride, rotary, dim)
        c = tl.reshape(tl.div_rn(total, weight), (TILES, WIDTH))
        exists = tl.reshape(top, (TILES, WIDTH)) > float("-inf")
        finish(
            c, tile_sums(c * c), exists, dim, slot, norm_weight, cos, sin, kv_cache, kv_page_stride,
            rms_norm_eps,
        )  # fmt: skip


@triton.jit
def compress_scan(
    state_cache, token_to_req, positions, boundary_token_indices, block_table, rms_norm_weight,
    cos_sin_cache, kv_slot_mapping, kv_cache, scratch, num_blocks, state_page_stride, state_row_stride,
    block_size, num_tokens, num_outputs, num_reqs, blocks_per_req, block_table_stride, max_pos,
    cos_sin_stride, kv_pages, kv_page_stride, weight_is_fp32, rms_norm_eps,
    RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_STAGES: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """First of two launches: one program scans a SPLIT-th of a window, BLOCK_D dimensions of it.

    The states go to scratch [outputs, SPLIT, 3, 512].
    """
    GROUPS: tl.constexpr = HEAD_DIM // BLOCK_D
    run = tl.program_id(0).to(tl.int64) // GROUPS
    dim = (tl.program_id(0) % GROUPS) * BLOCK_D + tl.arange(0, BLOCK_D)
    request, position, rotary, slot, wanted = locate(
        run // SPLIT, boundary_token_indices, token_to_req, positions, kv_slot_mapping, num_tokens,
        num_outputs, num_reqs, max_pos, kv_pages, RATIO,
    )  # fmt: skip
    if wanted:
        first = position - (RATIO - 1) + (run % SPLIT) * (RATIO // SPLIT)
        top, weight, total = scan_rows(
            state_cache, block_table + request * block_table_stride, first, num_blocks, state_page_stride,
            state_row_stride, block_size, blocks_per_req, dim, RATIO, BLOCK_SIZE, NUM_STAGES, SPLIT, BLOCK_D,
        )  # fmt: skip
        state = scratch + run * STATE + dim
        tl.store(state, top)
        tl.store(state + HEAD_DIM, weight)
        tl.store(state + 2 * HEAD_DIM, total)


@triton.jit
def one_state(state):
    return tl.load(state), tl.load(state + HEAD_DIM), tl.load(state + 2 * HEAD_DIM)


# Written out, because the front ends of Triton 3.1 and 3.2 do not take a function that calls itself.
@triton.jit
def two_states(state):
    top_a, weight_a, total_a = one_state(state)
    top_b, weight_b, total_b = one_state(state + STATE)
    return merge(top_a, weight_a, total_a, top_b, weight_b, total_b)


@triton.jit
def four_states(state):
    top_a, weight_a, total_a = two_states(state)
    top_b, weight_b, total_b = two_states(state + 2 * STATE)
    return merge(top_a, weight_a, total_a, top_b, weight_b, total_b)


@triton.jit
def eight_states(state):
    top_a, weight_a, total_a = four_states(state)
    top_b, weight_b, total_b = four_states(state + 4 * STATE)
    return merge(top_a, weight_a, total_a, top_b, weight_b, total_b)


@triton.jit
def merge_states(state, COUNT: tl.constexpr):
    """The states of COUNT (1, 2, 4 or 8) neighbouring runs in scratch, merged as a balanced tree."""
    if COUNT == 1:
        top, weight, total = one_state(state)
    elif COUNT == 2:
        top, weight, total = two_states(state)
    elif COUNT == 4:
        top, weight, total = four_states(state)
    else:
        top, weight, total = eight_states(state)
    return top, weight, total


@triton.jit
def compress_finalize(
    state_cache, token_to_req, positions, boundary_token_indices, block_table, rms_norm_weight,
    cos_sin_cache, kv_slot_mapping, kv_cache, scratch, num_blocks, state_page_stride, state_row_stride,
    block_size, num_tokens, num_outputs, num_reqs, blocks_per_req, block_table_stride, max_pos,
    cos_sin_stride, kv_pages, kv_page_stride, weight_is_fp32, rms_norm_eps,
    RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Second of two launches: one program merges an output's states and finishes it."""
    output = tl.program_id(0).to(tl.int64)
    request, position, rotary, slot, wanted = locate(
        output, boundary_token_indices, token_to_req, positions, kv_slot_mapping, num_tokens, num_outputs,
        num_reqs, max_pos, kv_pages, RATIO,
    )  # fmt: skip
    if wanted:
        dim = tl.arange(0, TILES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        norm_weight = load_weight(rms_norm_weight, weight_is_fp32, dim, BLOCK_SIZE)
        cos, sin = load_rotation(cos_sin_cache, cos_sin_stride, rotary, dim)
        top, weight, total = merge_states(scratch + output * (SPLIT * STATE) + dim, SPLIT)
        c = tl.div_rn(total, weight)
        finish(
            c, tile_sums(c * c), top > float("-inf"), dim, slot, norm_weight, cos, sin, kv_cache,
            kv_page_stride, rms_norm_eps,
        )  # fmt: skip
