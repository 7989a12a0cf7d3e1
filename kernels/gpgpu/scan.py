"""The window scan: C state rows -> one un-normalised vector, by an online softmax per dimension."""

import triton
import triton.language as tl

from ..contract import HEAD_DIM, LEAF_ROWS, WINDOW_PARTS

PARTS = tl.constexpr(WINDOW_PARTS)
LEAF = tl.constexpr(LEAF_ROWS)
# Dimensions of a tile row of the scan.
SCAN_WIDTH = tl.constexpr(64)
LEAST = tl.constexpr(-3.4028234663852886e38)
SCORE_OFFSET = tl.constexpr(HEAD_DIM)
LOG2E = tl.constexpr(1.4426950408889634)
# Block sizes from here on cross at most one page border in a window, so no division is needed; below it
# a 32-bit division is exact.
DIVISION_LIMIT = tl.constexpr(1 << 30)


@triton.jit
def first_page(first, block_size, BLOCK_SIZE: tl.constexpr):
    """The page column and the row within it of the window's first position, which may be negative."""
    if BLOCK_SIZE > 0:
        column = first >> 3
        return column, first - column * 8
    else:
        low = tl.where(first < 0, first - (block_size - 1), first)
        column = low // block_size
        return column, first - column * block_size


@triton.jit
def leaf_offsets(
    offset, table_row, column, in_page, below, num_blocks, state_page_stride, state_row_stride,
    block_size, blocks_per_req, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Where the four rows `offset` .. `offset + 3` (i32 [PARTS]) after the window's first begin.

    A row before position 0 (`offset < below`), outside the table or in no block does not exist: -1.
    """
    if BLOCK_SIZE > 0:
        # Four rows lie in two pages at most.
        row = in_page.to(tl.int32) + offset
        low = lookup(table_row, column + (row >> 3), blocks_per_req, num_blocks)
        high = lookup(table_row, column + ((row + 3) >> 3), blocks_per_req, num_blocks)
        r0 = place(row, row, low, high, state_page_stride, state_row_stride)
        r1 = place(row + 1, row, low, high, state_page_stride, state_row_stride)
        r2 = place(row + 2, row, low, high, state_page_stride, state_row_stride)
        r3 = place(row + 3, row, low, high, state_page_stride, state_row_stride)
    else:
        r0 = any_row(offset, table_row, column, in_page, num_blocks, state_page_stride, state_row_stride, block_size, blocks_per_req)  # fmt: skip  # noqa: E501
        r1 = any_row(offset + 1, table_row, column, in_page, num_blocks, state_page_stride, state_row_stride, block_size, blocks_per_req)  # fmt: skip  # noqa: E501
        r2 = any_row(offset + 2, table_row, column, in_page, num_blocks, state_page_stride, state_row_stride, block_size, blocks_per_req)  # fmt: skip  # noqa: E501
        r3 = any_row(offset + 3, table_row, column, in_page, num_blocks, state_page_stride, state_row_stride, block_size, blocks_per_req)  # fmt: skip  # noqa: E501
    r0 = tl.where(offset >= below, r0, -1)
    r1 = tl.where(offset + 1 >= below, r1, -1)
    r2 = tl.where(offset + 2 >= below, r2, -1)
    r3 = tl.where(offset + 3 >= below, r3, -1)
    return r0, r1, r2, r3


@triton.jit
def lookup(table_row, column, blocks_per_req, num_blocks):
    """The page in a table column, or -1."""
    inside = (column >= 0) & (column < blocks_per_req)
    page = tl.load(table_row + column, mask=inside, other=-1)
    return tl.where((page >= 0) & (page < num_blocks), page, -1)


@triton.jit
def place(row, leaf, low, high, state_page_stride, state_row_stride):
    page = tl.where((row >> 3) == (leaf >> 3), low, high)
    return tl.where(page < 0, -1, page * state_page_stride + (row & 7) * state_row_stride)


@triton.jit
def any_row(
    offset, table_row, column, in_page, num_blocks, state_page_stride, state_row_stride, block_size,
    blocks_per_req,
):  # fmt: skip
    """One row for any block size."""
    row = in_page + offset
    small = tl.minimum(block_size, DIVISION_LIMIT).to(tl.int32)
    short = tl.minimum(in_page, DIVISION_LIMIT).to(tl.int32)
    once = (row >= block_size).to(tl.int32)
    pages = tl.where(block_size < DIVISION_LIMIT, (short + offset) // small, once)
    page = lookup(table_row, column + pages, blocks_per_req, num_blocks)
    return tl.where(page < 0, -1, page * state_page_stride + (row - pages * block_size) * state_row_stride)


@triton.jit
def load_row(lane, row, BLOCK_SIZE: tl.constexpr):
    """Values and scores [GROUPS, PARTS, 64] of one row of each part; a missing row weighs nothing."""
    mask = (row >= 0)[None, :, None]
    if BLOCK_SIZE > 0:
        # The -1 of a missing row hides from the compiler that strides are multiples of 16.
        row = (row >> 4) << 4
    pointer = lane + row[None, :, None]
    score = tl.load(pointer + SCORE_OFFSET, mask=mask, other=float("-inf"))
    return tl.load(pointer, mask=mask, other=0.0), score


@triton.jit
def add_part_pairs(x, PARTS_IN: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Adds neighbouring parts of [GROUPS, PARTS_IN, WIDTH]: one addition each, so no layout changes it."""
    return tl.sum(tl.reshape(x, (GROUPS, PARTS_IN // 2, 2, WIDTH)), axis=2)


@triton.jit
def add_parts(x, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """[GROUPS, 8, WIDTH] -> [GROUPS, WIDTH] as ((0+1)+(2+3))+((4+5)+(6+7))."""
    x = add_part_pairs(add_part_pairs(x, 8, GROUPS, WIDTH), 4, GROUPS, WIDTH)
    return tl.reshape(add_part_pairs(x, 2, GROUPS, WIDTH), (GROUPS, WIDTH))


@triton.jit
def fold(top, weight, total, v0, v1, v2, v3, s0, s1, s2, s3, floor, WHOLE: tl.constexpr):
    """One leaf into the running maximum, sum of weights and weighted sum; WHOLE: each part has a row."""
    raised = tl.maximum(tl.maximum(top, floor), tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)))
    if WHOLE:
        finite = raised
    else:
        # While no row was met the difference to the maximum would be NaN.
        finite = tl.where(raised == float("-inf"), 0.0, raised)
    scale = tl.exp2((top - finite) * LOG2E)
    w0 = tl.exp2((s0 - finite) * LOG2E)
    w1 = tl.exp2((s1 - finite) * LOG2E)
    w2 = tl.exp2((s2 - finite) * LOG2E)
    w3 = tl.exp2((s3 - finite) * LOG2E)
    weight = weight * scale + ((w0 + w1) + (w2 + w3))
    total = total * scale + ((w0 * v0 + w1 * v1) + (w2 * v2 + w3 * v3))
    return raised, weight, total


@triton.jit
def combine_parts(top, weight, total, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """The parts' states [GROUPS, PARTS, WIDTH] into c [GROUPS, WIDTH], and where the window has a row."""
    peak = tl.max(top, axis=1)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    scale = tl.exp2((top - finite[:, None, :]) * LOG2E)
    weight = add_parts(weight * scale, GROUPS, WIDTH)
    total = add_parts(total * scale, GROUPS, WIDTH)
    return tl.div_rn(total, weight), peak > float("-inf")


@triton.jit
def leaf_floor(r0, r1, r2, r3):
    """The least maximum [1, PARTS, 1] of a leaf: a row whose scores are all -inf still is a row."""
    exists = (r0 >= 0) | (r1 >= 0) | (r2 >= 0) | (r3 >= 0)
    return tl.where(exists, LEAST, float("-inf"))[None, :, None]


@triton.jit
def scan_window(
    state_cache, table_row, position, num_blocks, state_page_stride, state_row_stride, block_size,
    blocks_per_req, dim, RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr,
    NUM_STAGES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The softmax-weighted sum of the window that ends at `position`, for the dimensions `dim` [GROUPS, 64].

    Returns c [GROUPS, 64] fp32, and whether the window has a row at all (i1, for each dimension).
    """
    first = position - (RATIO - 1)
    column, in_page = first_page(first, block_size, BLOCK_SIZE)
    part = tl.arange(0, PARTS) * (RATIO // PARTS)
    lane = state_cache + dim[:, None, :]
    top = tl.full([GROUPS, PARTS, SCAN_WIDTH], float("-inf"), tl.float32)
    weight = tl.zeros([GROUPS, PARTS, SCAN_WIDTH], tl.float32)
    total = tl.zeros([GROUPS, PARTS, SCAN_WIDTH], tl.float32)
    for step in tl.range(0, RATIO // PARTS, BLOCK_T, num_stages=NUM_STAGES):
        for leaf in tl.static_range(0, BLOCK_T, LEAF):
            r0, r1, r2, r3 = leaf_offsets(
                part + (step + leaf), table_row, column, in_page, -first, num_blocks, state_page_stride,
                state_row_stride, block_size, blocks_per_req, BLOCK_SIZE,
            )  # fmt: skip
            v0, s0 = load_row(lane, r0, BLOCK_SIZE)
            v1, s1 = load_row(lane, r1, BLOCK_SIZE)
            v2, s2 = load_row(lane, r2, BLOCK_SIZE)
            v3, s3 = load_row(lane, r3, BLOCK_SIZE)
            floor = leaf_floor(r0, r1, r2, r3)
            top, weight, total = fold(top, weight, total, v0, v1, v2, v3, s0, s1, s2, s3, floor, False)
    return combine_parts(top, weight, total, GROUPS, SCAN_WIDTH)
