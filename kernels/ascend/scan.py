"""Third stage of index_select: the weighted mean of gathered rows."""

import triton
import triton.language as tl

from .. import contract
from .leaf import LEAF, SCORES, empty_state, fold_rows, fold_tile, load_row, mean

HEAD_DIM = tl.constexpr(contract.HEAD_DIM)
STATE_WIDTH = tl.constexpr(contract.STATE_WIDTH)
PLACE = tl.constexpr(8)
# As in blocks.py.
CAREFUL_D = tl.constexpr(128)


@triton.jit
def gathered_row(lane, live, row, RATIO: tl.constexpr):
    """Row `row` of a window, which may lie before or behind it."""
    inside = (row >= 0) & (row < RATIO)
    row = tl.where(inside, row, 0)
    exists = inside & (tl.load(live + row) > 0.5)
    return load_row(lane, row * STATE_WIDTH, exists)


@triton.jit
def gathered_leaf(top, weight, total, lane, live, row, RATIO: tl.constexpr):
    """Rows `row` .. `row + 7` of a window, one by one; some may lie outside of it."""
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
def load_place(place, output):
    """An output's slot, rows of its first leaf before the window (i32), and whether all its rows are live."""
    mine = place + output * PLACE
    return tl.load(mine), tl.load(mine + 2).to(tl.int32), tl.load(mine + 3)


@triton.jit
def scan_rows(
    num_outputs, place, live, gathered, compressed, RATIO: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Masked rows, which are gathered too, are kept out of the sum. Two passes, for the unified buffer serves
    one after the other: whole windows that begin at a leaf's border, BLOCK_D dimensions an item, as tiles;
    then all others row by row, CAREFUL dimensions an item.
    """
    GROUPS: tl.constexpr = HEAD_DIM // BLOCK_D
    CAREFUL: tl.constexpr = CAREFUL_D if BLOCK_D > CAREFUL_D else BLOCK_D
    SHARES: tl.constexpr = HEAD_DIM // CAREFUL
    outputs = num_outputs.to(tl.int32)
    dim = tl.arange(0, BLOCK_D)
    tile = tl.arange(0, LEAF)[:, None] * STATE_WIDTH + dim[None, :]
    for item in range(tl.program_id(0), outputs * GROUPS, tl.num_programs(0)):
        item = tl.cast(item, tl.int32)
        output = (item // GROUPS).to(tl.int64)
        group = (item % GROUPS) * BLOCK_D
        slot, head, whole = load_place(place, output)
        if (slot >= 0) & (head == 0) & (whole > 0):
            first = gathered + output * (RATIO * STATE_WIDTH) + group
            top, weight, total = empty_state(BLOCK_D)
            for row in range(0, RATIO, LEAF):
                leaf = first + row * STATE_WIDTH + tile
                top, weight, total = fold_tile(
                    top, weight, total, tl.load(leaf), tl.load(leaf + SCORES), BLOCK_D
                )
            tl.store(compressed + output * HEAD_DIM + group + dim, mean(weight, total))
    lane = tl.arange(0, CAREFUL)
    for item in range(tl.program_id(0), outputs * SHARES, tl.num_programs(0)):
        item = tl.cast(item, tl.int32)
        output = (item // SHARES).to(tl.int64)
        group = (item % SHARES) * CAREFUL
        slot, head, whole = load_place(place, output)
        if (slot >= 0) & ((head > 0) | (whole == 0)):
            first = gathered + output * (RATIO * STATE_WIDTH) + group + lane
            top, weight, total = empty_state(CAREFUL)
            for row in range(0, head + RATIO, LEAF):
                top, weight, total = gathered_leaf(
                    top, weight, total, first, live + output * RATIO, row - head, RATIO
                )
            tl.store(compressed + output * HEAD_DIM + group + lane, mean(weight, total))
