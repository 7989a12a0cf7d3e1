"""Third stage of index_select: the weighted mean of gathered rows."""

import triton
import triton.language as tl

from .. import contract
from .leaf import LEAF, SCORES, empty_state, fold_rows, fold_tile, load_row, mean

HEAD_DIM = tl.constexpr(contract.HEAD_DIM)
STATE_WIDTH = tl.constexpr(contract.STATE_WIDTH)
PLACE = tl.constexpr(8)


@triton.jit
def gathered_row(lane, live, row, RATIO: tl.constexpr):
    """Row `row` of a window, which may lie before or behind it."""
    inside = (row >= 0) & (row < RATIO)
    row = tl.where(inside, row, 0)
    exists = inside & (tl.load(live + row) > 0.5)
    return load_row(lane, row * STATE_WIDTH, exists)


@triton.jit
def gathered_leaf(top, weight, total, lane, live, row, RATIO: tl.constexpr):
    """Rows `row` .. `row + 7` of a window, one by one: a leaf that crosses the window's border."""
    v0, s0 = gathered_row(lane, live, row, RATIO)
    v1, s1 = gathered_row(lane, live, row + 1, RATIO)
    v2, s2 = gathered_row(lane, live, row + 2, RATIO)
    v3, s3 = gathered_row(lane, live, row + 3, RATIO)
    v4, s4 = gathered_row(lane, live, row + 4, RATIO)
    v5, s5 = gathered_row(lane, live, row + 5, RATIO)
    v6, s6 = gathered_row(lane, live, row + 6, RATIO)
    v7, s7 = gathered_row(lane, live, row + 7, RATIO)
    return fold_rows(top, weight, total, v0, v1, v2, v3, v4, v5, v6, v7, s0, s1, s2, s3, s4, s5, s6, s7)


@triton.jit
def scan_rows(
    num_outputs, place, live, gathered, compressed, RATIO: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One item is one output's BLOCK_D dimensions. Masked rows, gathered too, are kept out of the sum."""
    GROUPS: tl.constexpr = HEAD_DIM // BLOCK_D
    dim = tl.arange(0, BLOCK_D)
    leaf_row = tl.arange(0, LEAF)
    tile = leaf_row[:, None] * STATE_WIDTH + dim[None, :]
    for item in range(tl.program_id(0), num_outputs.to(tl.int32) * GROUPS, tl.num_programs(0)):
        item = tl.cast(item, tl.int32)
        output = (item // GROUPS).to(tl.int64)
        group = (item % GROUPS) * BLOCK_D
        slot = tl.load(place + output * PLACE)
        if slot >= 0:
            head = tl.load(place + output * PLACE + 2).to(tl.int32)
            whole = tl.load(place + output * PLACE + 3)
            window = gathered + output * (RATIO * STATE_WIDTH) + group
            alive = live + output * RATIO
            top, weight, total = empty_state(BLOCK_D)
            begin = head * 0
            end = begin + RATIO
            if head > 0:
                top, weight, total = gathered_leaf(
                    top, weight, total, window + dim, alive, -head, RATIO
                )
                begin = LEAF - head
                end = RATIO - head
            if whole > 0:
                for row in range(begin, end, LEAF):
                    leaf = window + row * STATE_WIDTH + tile
                    top, weight, total = fold_tile(
                        top, weight, total, tl.load(leaf), tl.load(leaf + SCORES), BLOCK_D
                    )
            else:
                for row in range(begin, end, LEAF):
                    leaf = window + row * STATE_WIDTH + tile
                    exists = tl.load(alive + row + leaf_row)[:, None] > 0.5
                    values = tl.where(exists, tl.load(leaf), 0.0)
                    scores = tl.where(exists, tl.load(leaf + SCORES), float("-inf"))
                    top, weight, total = fold_tile(top, weight, total, values, scores, BLOCK_D)
            if head > 0:
                top, weight, total = gathered_leaf(top, weight, total, window + dim, alive, end, RATIO)
            tl.store(compressed + output * HEAD_DIM + group + dim, mean(weight, total))
