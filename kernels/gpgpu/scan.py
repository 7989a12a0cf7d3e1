"""The window scan: state rows -> the running state of an online softmax per dimension.

A state is three vectors: the largest score met, the sum of weights exp(score - largest), and the sum of
weighted values. Leaves of four rows are folded into a part's state, states of neighbouring parts are merged
in a balanced tree; both in one fixed order.
"""

import triton
import triton.language as tl

from ..contract import HEAD_DIM, LEAF_ROWS, WINDOW_PARTS

PARTS = tl.constexpr(WINDOW_PARTS)
LEAF = tl.constexpr(LEAF_ROWS)
SCORE_OFFSET = tl.constexpr(HEAD_DIM)
LOG2E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-3.4028234663852886e38)
# Rows are read once: they should not push the indices and other kernels' data out of L2. Gluon kernels only,
# because not every vendor's compiler takes the hint.
ONCE = tl.constexpr("evict_first")
# Block sizes from here on cross at most one page border in a window, so no division is needed; below it
# a 32-bit division is exact.
DIVISION_LIMIT = tl.constexpr(1 << 30)


@triton.jit
def first_page(first, block_size, BLOCK_SIZE: tl.constexpr):
    """The page column and the row within it of position `first`, which may be negative."""
    if BLOCK_SIZE > 0:
        column = first >> 3
        return column, first - column * 8
    else:
        low = tl.where(first < 0, first - (block_size - 1), first)
        column = low // block_size
        return column, first - column * block_size


@triton.jit
def lookup(table_row, column, blocks_per_req, num_blocks):
    """The page in a table column, or -1."""
    inside = (column >= 0) & (column < blocks_per_req)
    page = tl.load(table_row + column, mask=inside, other=-1)
    return tl.where((page >= 0) & (page < num_blocks), page, -1)


@triton.jit
def row_offset(page, row, exists, state_page_stride, state_row_stride):
    """Where a row of a page begins, in elements; -1 if the row does not exist."""
    return tl.where(exists & (page >= 0), page * state_page_stride + row * state_row_stride, -1)


@triton.jit
def any_row(
    offset, table_row, column, in_page, below, num_blocks, state_page_stride, state_row_stride, block_size,
    blocks_per_req,
):  # fmt: skip
    """row_offset of the row `offset` (i32) after the first one, for any block size."""
    row = in_page + offset
    small = tl.minimum(block_size, DIVISION_LIMIT).to(tl.int32)
    short = tl.minimum(in_page, DIVISION_LIMIT).to(tl.int32)
    once = (row >= block_size).to(tl.int32)
    pages = tl.where(block_size < DIVISION_LIMIT, (short + offset) // small, once)
    page = lookup(table_row, column + pages, blocks_per_req, num_blocks)
    return row_offset(page, row - pages * block_size, offset >= below, state_page_stride, state_row_stride)


@triton.jit
def leaf_offsets(
    offset, table_row, column, in_page, below, num_blocks, state_page_stride, state_row_stride, block_size,
    blocks_per_req, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Where the four rows `offset` .. `offset + 3` (i32) after the first one begin.

    A row before position 0 (`offset < below`), outside the table or in no block does not exist: -1.
    """
    if BLOCK_SIZE > 0:
        # Four rows lie in two pages at most.
        row = in_page.to(tl.int32) + offset
        low = lookup(table_row, column + (row >> 3), blocks_per_req, num_blocks)
        high = lookup(table_row, column + ((row + 3) >> 3), blocks_per_req, num_blocks)
        last = row | 7
        r0 = row_offset(low, row & 7, offset >= below, state_page_stride, state_row_stride)
        page = tl.where(row + 1 <= last, low, high)
        r1 = row_offset(page, (row + 1) & 7, offset + 1 >= below, state_page_stride, state_row_stride)
        page = tl.where(row + 2 <= last, low, high)
        r2 = row_offset(page, (row + 2) & 7, offset + 2 >= below, state_page_stride, state_row_stride)
        r3 = row_offset(high, (row + 3) & 7, offset + 3 >= below, state_page_stride, state_row_stride)
    else:
        r0 = any_row(offset, table_row, column, in_page, below, num_blocks, state_page_stride, state_row_stride, block_size, blocks_per_req)  # fmt: skip  # noqa: E501
        r1 = any_row(offset + 1, table_row, column, in_page, below, num_blocks, state_page_stride, state_row_stride, block_size, blocks_per_req)  # fmt: skip  # noqa: E501
        r2 = any_row(offset + 2, table_row, column, in_page, below, num_blocks, state_page_stride, state_row_stride, block_size, blocks_per_req)  # fmt: skip  # noqa: E501
        r3 = any_row(offset + 3, table_row, column, in_page, below, num_blocks, state_page_stride, state_row_stride, block_size, blocks_per_req)  # fmt: skip  # noqa: E501
    return r0, r1, r2, r3


@triton.jit
def load_row(lane, row, BLOCK_SIZE: tl.constexpr):
    """Values and scores [BLOCK_D] of the row that begins at `row`; a missing row weighs nothing."""
    exists = row >= 0
    if BLOCK_SIZE > 0:
        # The -1 of a missing row hides from the compiler that strides are multiples of 16.
        row = (row >> 4) << 4
    score = tl.load(lane + row + SCORE_OFFSET, mask=exists, other=float("-inf"))
    return tl.load(lane + row, mask=exists, other=0.0), score


@triton.jit
def leaf_floor(r0, r1, r2, r3):
    """The least maximum of a leaf: a row whose scores are all -inf still is a row."""
    exists = (r0 >= 0) | (r1 >= 0) | (r2 >= 0) | (r3 >= 0)
    return tl.where(exists, LEAST, float("-inf"))


@triton.jit
def fold(top, weight, total, v0, v1, v2, v3, s0, s1, s2, s3, floor, WHOLE: tl.constexpr):
    """One leaf into a state. WHOLE: the leaf has a row for certain."""
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
def merge(top_a, weight_a, total_a, top_b, weight_b, total_b):
    """The state of two neighbouring runs of rows; commutes, and an empty run changes nothing."""
    top = tl.maximum(top_a, top_b)
    finite = tl.where(top == float("-inf"), 0.0, top)
    scale_a = tl.exp2((top_a - finite) * LOG2E)
    scale_b = tl.exp2((top_b - finite) * LOG2E)
    return top, weight_a * scale_a + weight_b * scale_b, total_a * scale_a + total_b * scale_b


@triton.jit
def end_part(
    done, top, weight, total, top1, weight1, total1, top2, weight2, total2, top4, weight4, total4
):  # fmt: skip
    """Adds the state of part number `done` (from 1) to those that wait, as to a binary counter's digits.

    top1, top2, top4 and so on: the last finished runs of 1, 2 and 4 parts. After the last part of 1, 2, 4
    or 8 the first of them is the state of all.
    """
    if done % 2 == 0:
        top, weight, total = merge(top1, weight1, total1, top, weight, total)
        if done % 4 == 0:
            top, weight, total = merge(top2, weight2, total2, top, weight, total)
            if done % 8 == 0:
                top, weight, total = merge(top4, weight4, total4, top, weight, total)
            top4, weight4, total4 = top, weight, total
        top2, weight2, total2 = top, weight, total
    return top, weight, total, top2, weight2, total2, top4, weight4, total4


@triton.jit
def scan_rows(
    state_cache, table_row, first, num_blocks, state_page_stride, state_row_stride, block_size,
    blocks_per_req, dim, RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_STAGES: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The state of one SPLIT-th of a window, from position `first` on, for the dimensions `dim` [BLOCK_D].

    Three vectors [BLOCK_D] fp32. Row after row: the memory likes 4 KiB at a time.
    """
    PART_ROWS: tl.constexpr = RATIO // PARTS
    column, in_page = first_page(first, block_size, BLOCK_SIZE)
    lane = state_cache + dim
    empty = tl.full([BLOCK_D], float("-inf"), tl.float32)
    zero = tl.zeros([BLOCK_D], tl.float32)
    top, weight, total = empty, zero, zero
    top1, weight1, total1 = empty, zero, zero
    top2, weight2, total2 = empty, zero, zero
    top4, weight4, total4 = empty, zero, zero
    for step in tl.range(0, RATIO // SPLIT, LEAF, num_stages=NUM_STAGES):
        r0, r1, r2, r3 = leaf_offsets(
            step, table_row, column, in_page, -first, num_blocks, state_page_stride, state_row_stride,
            block_size, blocks_per_req, BLOCK_SIZE,
        )  # fmt: skip
        v0, s0 = load_row(lane, r0, BLOCK_SIZE)
        v1, s1 = load_row(lane, r1, BLOCK_SIZE)
        v2, s2 = load_row(lane, r2, BLOCK_SIZE)
        v3, s3 = load_row(lane, r3, BLOCK_SIZE)
        floor = leaf_floor(r0, r1, r2, r3)
        top, weight, total = fold(top, weight, total, v0, v1, v2, v3, s0, s1, s2, s3, floor, False)
        if (step + LEAF) % PART_ROWS == 0:
            top1, weight1, total1, top2, weight2, total2, top4, weight4, total4 = end_part(
                (step + LEAF) // PART_ROWS, top, weight, total, top1, weight1, total1, top2, weight2, total2,
                top4, weight4, total4,
            )  # fmt: skip
            top, weight, total = empty, zero, zero
    return top1, weight1, total1
