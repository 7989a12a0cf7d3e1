"""The kernel for chips with thread-block clusters (NVIDIA sm_90 and above), in Gluon.

A cluster owns an output; each of its blocks owns a group of dimensions of the whole window, keeps
NUM_STAGES leaves of it under way by asynchronous copies, and exchanges nothing with the others but the
sums of squares, through distributed shared memory. No scratch, one launch.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .finalize import TILES, WIDTH
from .in_gluon import (
    finish,
    fold,
    fold_leaf,
    leaf_floor,
    leaf_offsets,
    load_rotation,
    load_row,
    load_weight,
    locate,
    lookup,
    tile_sums,
)
from .scan import LOG2E, ONCE, PARTS, SCORE_OFFSET


@gluon.constexpr_function
def doublings(first, count):
    return [first << i for i in range(count)]


@gluon.constexpr_function
def log2(x):
    return x.bit_length() - 1


@gluon.constexpr_function
def scan_layout(num_warps, num_ctas):
    """[TILES, PARTS, WIDTH]: a warp holds all parts of 16 dimensions, a thread four dimensions of a part."""
    blocks = [[x, 0, 0] for x in doublings(1, log2(num_ctas))]
    return gl.BlockedLayout([1, 1, 4], [1, 8, 4], [num_warps, 1, 1], [2, 1, 0], blocks)


@gluon.constexpr_function
def flat_layout(num_warps, num_ctas):
    """[TILES, WIDTH], placed as in the scan, each value in the eight threads that held its parts."""
    share = 32 // num_ctas
    registers = [[0, 1], [0, 2]] + [[x, 0] for x in doublings(num_warps, log2(share // num_warps))]
    lanes = [[0, 4], [0, 8], [0, 0], [0, 0], [0, 0]]
    warps = [[x, 0] for x in doublings(1, log2(num_warps))]
    blocks = [[x, 0] for x in doublings(share, log2(num_ctas))]
    return gl.DistributedLinearLayout(registers, lanes, warps, blocks, [32, 16])


@gluon.constexpr_function
def everywhere_layout(num_warps, num_ctas):
    """[TILES], one value a lane, in every warp of every block."""
    lanes = [[x] for x in doublings(1, 5)]
    return gl.DistributedLinearLayout([], lanes, [[0]] * log2(num_warps), [[0]] * log2(num_ctas), [32])


@gluon.jit
def load_pages(part, table_row, column, blocks_per_req, num_blocks, RATIO: gl.constexpr):
    """The pages of each part, -1 where there is none: a tuple of [PARTS].

    All at once and before any row: a load that waits for a load would leave the memory idle in between.
    """
    pages = ()
    for page in gl.static_range(RATIO // PARTS // 8):
        pages = pages + (lookup(table_row, column + (part >> 3) + page, blocks_per_req, num_blocks),)
    return pages


@gluon.jit
def copy_leaf(ring, slot, lane, page, row, state_page_stride, state_row_stride):
    """Starts the copies of a leaf, four rows of each part from row `row` of its page, as one group."""
    start = lane + (page * state_page_stride + row * state_row_stride)[None, :, None]
    for at in gl.static_range(4):
        pointer = start + at * state_row_stride
        async_copy.async_load(ring.index(slot * 8 + at * 2), pointer, eviction_policy=ONCE)
        async_copy.async_load(ring.index(slot * 8 + at * 2 + 1), pointer + SCORE_OFFSET, eviction_policy=ONCE)
    async_copy.commit_group()


@gluon.jit
def stream_whole(
    ring, lane, table, pages, state_page_stride, state_row_stride, RATIO: gl.constexpr, STAGES: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The parts' states of a window of whole pages: its leaves through the ring, STAGES under way at a time.

    table: where each part's page numbers begin. A loop, because unrolled the code is longer than what a
    multiprocessor keeps of it, and runs only once.
    """
    LEAVES: gl.constexpr = RATIO // PARTS // 4
    DEEP: gl.constexpr = min(STAGES, LEAVES)
    for leaf in gl.static_range(DEEP):
        copy_leaf(ring, leaf, lane, pages[leaf >> 1], (leaf & 1) * 4, state_page_stride, state_row_stride)
    top = gl.full([TILES, PARTS, WIDTH], float("-inf"), gl.float32, LAYOUT)
    weight = gl.full([TILES, PARTS, WIDTH], 0.0, gl.float32, LAYOUT)
    total = gl.full([TILES, PARTS, WIDTH], 0.0, gl.float32, LAYOUT)
    if LEAVES > DEEP:
        coming = pages[DEEP >> 1]
        for leaf in range(LEAVES - DEEP):
            after = gl.load(table + (min(leaf + DEEP + 1, LEAVES - 1) >> 1))
            async_copy.wait_group(DEEP - 1)
            slot = leaf % DEEP
            top, weight, total = fold_leaf(ring, slot * 8, top, weight, total, LAYOUT)
            copy_leaf(ring, slot, lane, coming, ((leaf + DEEP) & 1) * 4, state_page_stride, state_row_stride)
            coming = after
    for leaf in gl.static_range(DEEP):
        async_copy.wait_group(DEEP - 1 - leaf)
        top, weight, total = fold_leaf(ring, (LEAVES - DEEP + leaf) % DEEP * 8, top, weight, total, LAYOUT)
    return top, weight, total


@gluon.jit
def stream_any(
    lane, part, table_row, column, in_page, below, num_blocks, state_page_stride, state_row_stride,
    block_size, blocks_per_req, RATIO: gl.constexpr, BLOCK_SIZE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The same of a window that begins within a page or lacks rows."""
    top = gl.full([TILES, PARTS, WIDTH], float("-inf"), gl.float32, LAYOUT)
    weight = gl.full([TILES, PARTS, WIDTH], 0.0, gl.float32, LAYOUT)
    total = gl.full([TILES, PARTS, WIDTH], 0.0, gl.float32, LAYOUT)
    for leaf in range(RATIO // PARTS // 4):
        r0, r1, r2, r3 = leaf_offsets(
            part + leaf * 4, table_row, column, in_page, below, num_blocks, state_page_stride,
            state_row_stride, block_size, blocks_per_req, BLOCK_SIZE,
        )  # fmt: skip
        v0, s0 = load_row(lane, r0[None, :, None], BLOCK_SIZE)
        v1, s1 = load_row(lane, r1[None, :, None], BLOCK_SIZE)
        v2, s2 = load_row(lane, r2[None, :, None], BLOCK_SIZE)
        v3, s3 = load_row(lane, r3[None, :, None], BLOCK_SIZE)
        floor = leaf_floor(r0, r1, r2, r3)[None, :, None]
        top, weight, total = fold(top, weight, total, v0, v1, v2, v3, s0, s1, s2, s3, floor, False)
    return top, weight, total


@gluon.jit
def stream_window(
    state_cache, request, position, block_table, block_table_stride, blocks_per_req, num_blocks,
    state_page_stride, state_row_stride, block_size, RATIO: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    STAGES: gl.constexpr, LAYOUT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """The parts' states [TILES, PARTS, WIDTH] of the window that ends at `position`."""
    tile = gl.arange(0, TILES, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    inner = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    lane = state_cache + (tile[:, None, None] * WIDTH + inner[None, None, :])
    part = gl.arange(0, PARTS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))) * (RATIO // PARTS)
    first = position - (RATIO - 1)
    column = first >> 3
    in_page = (first & 7).to(gl.int32)
    table_row = block_table + request * block_table_stride
    pages = load_pages(part, table_row, column, blocks_per_req, num_blocks, RATIO)
    least = part * 0
    for page in gl.static_range(RATIO // PARTS // 8):
        least = least | pages[page]
    # The window of a true boundary token begins with a page and has all its rows: no masks then.
    if (in_page == 0) & (first >= 0) & (gl.min(least, axis=0) >= 0):
        ring = gl.allocate_shared_memory(
            gl.float32, [min(STAGES, RATIO // PARTS // 4) * 8, TILES, PARTS, WIDTH], SHARED
        )
        top, weight, total = stream_whole(
            ring, lane, table_row + (column + (part >> 3)), pages, state_page_stride, state_row_stride,
            RATIO, STAGES, LAYOUT,
        )  # fmt: skip
    else:
        top, weight, total = stream_any(
            lane, part, table_row, column, in_page, -first, num_blocks, state_page_stride, state_row_stride,
            block_size, blocks_per_req, RATIO, BLOCK_SIZE, LAYOUT,
        )  # fmt: skip
    return top, weight, total


@gluon.jit
def merge_neighbours(top, weight, total, COUNT: gl.constexpr):
    """[TILES, COUNT, WIDTH] -> [TILES, COUNT / 2, WIDTH]: scan.merge, between lanes of a warp.

    Each sum has two terms, so its order is that of scan.merge whatever the layout.
    """
    top = gl.reshape(top, (TILES, COUNT // 2, 2, WIDTH))
    peak = gl.max(top, axis=2)
    finite = gl.where(peak == float("-inf"), 0.0, peak)
    scale = gl.exp2((top - finite[:, :, None, :]) * LOG2E)
    weight = gl.sum(gl.reshape(weight, (TILES, COUNT // 2, 2, WIDTH)) * scale, axis=2)
    return peak, weight, gl.sum(gl.reshape(total, (TILES, COUNT // 2, 2, WIDTH)) * scale, axis=2)


@gluon.jit
def compress_cluster(
    state_cache, token_to_req, positions, boundary_token_indices, block_table, rms_norm_weight,
    cos_sin_cache, kv_slot_mapping, kv_cache, scratch, num_blocks, state_page_stride, state_row_stride,
    block_size, num_tokens, num_outputs, num_reqs, blocks_per_req, block_table_stride, max_pos,
    cos_sin_stride, kv_pages, kv_page_stride, weight_is_fp32, rms_norm_eps,
    RATIO: gl.constexpr, BLOCK_SIZE: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """One cluster owns an output: scan and finish in one launch. Block size 8 and aligned operands only."""
    LAYOUT: gl.constexpr = scan_layout(gl.num_warps(), gl.num_ctas())
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0], LAYOUT.cga_layout)
    FLAT: gl.constexpr = flat_layout(gl.num_warps(), gl.num_ctas())
    EVERYWHERE: gl.constexpr = everywhere_layout(gl.num_warps(), gl.num_ctas())
    output = gl.program_id(0).to(gl.int64)
    request, position, rotary, slot, wanted = locate(
        output, boundary_token_indices, token_to_req, positions, kv_slot_mapping, num_tokens, num_outputs,
        num_reqs, max_pos, kv_pages, RATIO,
    )  # fmt: skip
    if wanted:
        dim = gl.arange(0, TILES, gl.SliceLayout(1, FLAT))[:, None] * WIDTH
        dim += gl.arange(0, WIDTH, gl.SliceLayout(0, FLAT))[None, :]
        # Loaded before the scan, so that their latency is not added to the tail.
        norm_weight = load_weight(rms_norm_weight, weight_is_fp32, dim, BLOCK_SIZE)
        cos, sin = load_rotation(cos_sin_cache, cos_sin_stride, rotary, dim)
        top, weight, total = stream_window(
            state_cache, request, position, block_table, block_table_stride, blocks_per_req, num_blocks,
            state_page_stride, state_row_stride, block_size, RATIO, BLOCK_SIZE, NUM_STAGES, LAYOUT, SHARED,
        )  # fmt: skip
        top, weight, total = merge_neighbours(top, weight, total, 8)
        top, weight, total = merge_neighbours(top, weight, total, 4)
        top, weight, total = merge_neighbours(top, weight, total, 2)
        c = gl.reshape(gl.div_rn(total, weight), (TILES, WIDTH))
        c = gl.convert_layout(c, FLAT, assert_trivial=True)
        exists = gl.convert_layout(gl.reshape(top, (TILES, WIDTH)), FLAT, assert_trivial=True) > float("-inf")
        squares = gl.convert_layout(tile_sums(c * c), EVERYWHERE)
        finish(c, squares, exists, dim, slot, norm_weight, cos, sin, kv_cache, kv_page_stride, rms_norm_eps)
