"""The kernel for many outputs on NVIDIA sm_80 and above, in Gluon.

One thread block owns an output and reads its window page by page, each 32 KiB in one piece, with
NUM_STAGES pages under way by asynchronous copies. No scratch, one launch.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .finalize import HEAD_DIM, TILES, WIDTH
from .in_gluon import (
    end_part,
    finish,
    fold,
    fold_leaf,
    leaf_floor,
    leaf_offsets,
    load_rotation,
    load_row,
    load_weight,
    locate,
    tile_sums,
)
from .scan import LEAF, ONCE, PARTS, SCORE_OFFSET


@gluon.constexpr_function
def table_layout(pages, num_warps):
    """[pages]: spread over the lanes, the same in every warp, so that a reduction needs no barrier."""
    lanes = [[1 << i] if 1 << i < pages else [0] for i in range(5)]
    registers = [[32]] if pages == 64 else []
    warps = [[0]] * (num_warps.bit_length() - 1)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [pages])


@gluon.jit
def copy_page(ring, slot, lane, page, state_page_stride, state_row_stride, wanted):
    """Starts the copies of a page, values and scores of eight rows, as one group; empty if not wanted."""
    start = lane + page * state_page_stride
    for row in gl.static_range(8):
        value = start + row * state_row_stride
        score = start + (row * state_row_stride + SCORE_OFFSET)
        async_copy.async_load(ring.index(slot * 16 + 2 * row), value, mask=wanted, eviction_policy=ONCE)
        async_copy.async_load(ring.index(slot * 16 + 2 * row + 1), score, mask=wanted, eviction_policy=ONCE)
    async_copy.commit_group()


@gluon.jit
def compress_stream(
    state_cache, token_to_req, positions, boundary_token_indices, block_table, rms_norm_weight,
    cos_sin_cache, kv_slot_mapping, kv_cache, scratch, num_blocks, state_page_stride, state_row_stride,
    block_size, num_tokens, num_outputs, num_reqs, blocks_per_req, block_table_stride, max_pos,
    cos_sin_stride, kv_pages, kv_page_stride, weight_is_fp32, rms_norm_eps,
    RATIO: gl.constexpr, BLOCK_SIZE: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """One block owns an output. Block size 8 and aligned operands only."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    PAGES: gl.constexpr = RATIO // 8
    PART_PAGES: gl.constexpr = PAGES // PARTS
    TABLE: gl.constexpr = table_layout(PAGES, gl.num_warps())
    output = gl.program_id(0).to(gl.int64)
    request, position, rotary, slot, wanted = locate(
        output, boundary_token_indices, token_to_req, positions, kv_slot_mapping, num_tokens, num_outputs,
        num_reqs, max_pos, kv_pages, RATIO,
    )  # fmt: skip
    if wanted:
        lane = state_cache + gl.arange(0, HEAD_DIM, LAYOUT)
        dim = gl.reshape(gl.arange(0, HEAD_DIM, LAYOUT), (TILES, WIDTH))
        first = position - (RATIO - 1)
        column = first >> 3
        in_page = first - column * 8
        table_row = block_table + request * block_table_stride
        columns = column + gl.arange(0, PAGES, TABLE)
        pages = gl.load(table_row + columns, mask=(columns >= 0) & (columns < blocks_per_req), other=-1)
        pages = gl.where(pages < num_blocks, pages, -1)
        here = table_row + column
        ahead = ()
        for early in gl.static_range(NUM_STAGES + 1):
            inside = (column + early >= 0) & (column + early < blocks_per_req)
            ahead = ahead + (gl.load(here + early, mask=inside, other=0),)
        # Loaded before the scan, so that their latency is not added to the tail.
        norm_weight = load_weight(rms_norm_weight, weight_is_fp32, dim, BLOCK_SIZE)
        cos, sin = load_rotation(cos_sin_cache, cos_sin_stride, rotary, dim)
        empty = gl.full([HEAD_DIM], float("-inf"), gl.float32, LAYOUT)
        zero = gl.full([HEAD_DIM], 0.0, gl.float32, LAYOUT)
        top, weight, total = empty, zero, zero
        top1, weight1, total1 = empty, zero, zero
        top2, weight2, total2 = empty, zero, zero
        top4, weight4, total4 = empty, zero, zero
        # The window of a true boundary token begins with a page and has all its rows: no masks then.
        if (in_page == 0) & (first >= 0) & (gl.min(pages, axis=0) >= 0):
            ring = gl.allocate_shared_memory(
                gl.float32, [NUM_STAGES * 16, HEAD_DIM], gl.SwizzledSharedLayout(1, 1, 1, [0])
            )
            for early in gl.static_range(NUM_STAGES):
                copy_page(ring, early, lane, ahead[early], state_page_stride, state_row_stride, None)
            coming = ahead[NUM_STAGES]
            for page in range(PAGES):
                # Read a page ahead of its copy, and before younger copies, which it would wait for.
                after = gl.load(here + (page + NUM_STAGES + 1), mask=page + NUM_STAGES + 1 < PAGES, other=0)
                async_copy.wait_group(NUM_STAGES - 1)
                at = page % NUM_STAGES
                top, weight, total = fold_leaf(ring, at * 16, top, weight, total, LAYOUT)
                top, weight, total = fold_leaf(ring, at * 16 + 8, top, weight, total, LAYOUT)
                more = page + NUM_STAGES < PAGES
                copy_page(ring, at, lane, coming, state_page_stride, state_row_stride, more)
                coming = after
                if (page + 1) % PART_PAGES == 0:
                    top1, weight1, total1, top2, weight2, total2, top4, weight4, total4 = end_part(
                        (page + 1) // PART_PAGES, top, weight, total, top1, weight1, total1, top2, weight2,
                        total2, top4, weight4, total4,
                    )  # fmt: skip
                    top, weight, total = empty, zero, zero
        else:
            for leaf in range(RATIO // LEAF):
                r0, r1, r2, r3 = leaf_offsets(
                    leaf * LEAF, table_row, column, in_page, -first, num_blocks, state_page_stride,
                    state_row_stride, block_size, blocks_per_req, BLOCK_SIZE,
                )  # fmt: skip
                v0, s0 = load_row(lane, r0, BLOCK_SIZE)
                v1, s1 = load_row(lane, r1, BLOCK_SIZE)
                v2, s2 = load_row(lane, r2, BLOCK_SIZE)
                v3, s3 = load_row(lane, r3, BLOCK_SIZE)
                floor = leaf_floor(r0, r1, r2, r3)
                top, weight, total = fold(top, weight, total, v0, v1, v2, v3, s0, s1, s2, s3, floor, False)
                if (leaf + 1) % (2 * PART_PAGES) == 0:
                    top1, weight1, total1, top2, weight2, total2, top4, weight4, total4 = end_part(
                        (leaf + 1) // (2 * PART_PAGES), top, weight, total, top1, weight1, total1, top2,
                        weight2, total2, top4, weight4, total4,
                    )  # fmt: skip
                    top, weight, total = empty, zero, zero
        c = gl.reshape(gl.div_rn(total1, weight1), (TILES, WIDTH))
        exists = gl.reshape(top1, (TILES, WIDTH)) > float("-inf")
        finish(
            c, tile_sums(c * c), exists, dim, slot, norm_weight, cos, sin, kv_cache, kv_page_stride,
            rms_norm_eps,
        )  # fmt: skip
