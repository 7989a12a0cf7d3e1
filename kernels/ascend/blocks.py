"""First stage of the block route: the weighted mean straight from the state cache's blocks."""

import triton
import triton.language as tl

from .. import contract
from .leaf import LEAF, SCORES, empty_state, fold_rows, fold_tile, load_row, mean
from .locate import floor_divide, locate, lookup, store_place

HEAD_DIM = tl.constexpr(contract.HEAD_DIM)
# Dimensions of an item on the path that is seldom taken: few, so that the other's loads are double-buffered.
CAREFUL_D = tl.constexpr(128)


@triton.jit
def count_rows(table_row, column, last, first, position, block_size, blocks_per_req, num_blocks):
    """How many rows of a window exist, i32."""
    found = (column * 0).to(tl.int32)
    for step in range(0, (last - column).to(tl.int32) + 1):
        here = column + step
        if lookup(table_row, here, blocks_per_req, num_blocks) >= 0:
            begin = here * block_size
            low = tl.maximum(begin, first)
            high = tl.minimum(begin + (block_size - 1), position)
            found += (high - low).to(tl.int32) + 1
    return found


@triton.jit
def window(
    output, token_to_req, positions, boundary_token_indices, block_table, kv_slot_mapping, num_blocks,
    block_size, num_tokens, num_reqs, blocks_per_req, block_table_stride, max_pos, kv_pages,
    RATIO: tl.constexpr,
):  # fmt: skip
    """An output's table row, first position, rotary position, slot, and how many of its rows exist."""
    request, position, rotary, slot = locate(
        output, token_to_req, positions, boundary_token_indices, kv_slot_mapping, num_tokens, num_reqs,
        max_pos, kv_pages, RATIO,
    )  # fmt: skip
    first = position - (RATIO - 1)
    table_row = block_table + request * block_table_stride
    found = (slot * 0).to(tl.int32)
    if slot >= 0:
        found = count_rows(
            table_row, floor_divide(first, block_size), position // block_size, first, position, block_size,
            blocks_per_req, num_blocks,
        )  # fmt: skip
    return table_row, first, rotary, slot, found


@triton.jit
def some_rows(
    top, weight, total, lane, table_row, column, low, high, blocks_per_req, num_blocks, state_page_stride,
    state_row_stride,
):  # fmt: skip
    """Those rows of a block of eight whose numbers are from low to high - 1, into the state."""
    block = lookup(table_row, column, blocks_per_req, num_blocks)
    if block >= 0:
        page = lane + block * state_page_stride
        v0, s0 = load_row(page, state_row_stride * 0, (low <= 0) & (high > 0))
        v1, s1 = load_row(page, state_row_stride * 1, (low <= 1) & (high > 1))
        v2, s2 = load_row(page, state_row_stride * 2, (low <= 2) & (high > 2))
        v3, s3 = load_row(page, state_row_stride * 3, (low <= 3) & (high > 3))
        v4, s4 = load_row(page, state_row_stride * 4, (low <= 4) & (high > 4))
        v5, s5 = load_row(page, state_row_stride * 5, (low <= 5) & (high > 5))
        v6, s6 = load_row(page, state_row_stride * 6, (low <= 6) & (high > 6))
        v7, s7 = load_row(page, state_row_stride * 7, (low <= 7) & (high > 7))
        top, weight, total = fold_rows(
            top, weight, total, v0, v1, v2, v3, v4, v5, v6, v7, s0, s1, s2, s3, s4, s5, s6, s7
        )
    return top, weight, total


@triton.jit
def scan_whole(
    state, dim, table_row, column, state_page_stride, state_row_stride, RATIO: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A window of whole blocks of eight rows that all exist: a block is a leaf, and nothing is masked."""
    tile = tl.arange(0, LEAF).to(tl.int64)[:, None] * state_row_stride + dim[None, :]
    top, weight, total = empty_state(BLOCK_D)
    for step in range(0, RATIO // LEAF):
        block = tl.load(table_row + column + step).to(tl.int64)
        leaf = state + block * state_page_stride + tile
        top, weight, total = fold_tile(top, weight, total, tl.load(leaf), tl.load(leaf + SCORES), BLOCK_D)
    return mean(weight, total)


@triton.jit
def scan_eight(
    state, dim, table_row, first, num_blocks, blocks_per_req, state_page_stride, state_row_stride,
    RATIO: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Any window over blocks of eight rows, row by row: rows before and behind it are masked, and a block
    that does not exist is passed over."""
    top, weight, total = empty_state(BLOCK_D)
    column = first >> 3
    head = (first & 7).to(tl.int32)
    end = head + RATIO
    for step in range(0, (end + 7) >> 3):
        top, weight, total = some_rows(
            top, weight, total, state + dim, table_row, column + step, head - step * 8, end - step * 8,
            blocks_per_req, num_blocks, state_page_stride, state_row_stride,
        )  # fmt: skip
    return mean(weight, total)


@triton.jit
def any_row(
    lane, table_row, column, row, t, first, position, block_size, blocks_per_req, num_blocks,
    state_page_stride, state_row_stride,
):  # fmt: skip
    """The row of position t, which is row `row` of the table's column, and the column and row after it."""
    block = lookup(table_row, column, blocks_per_req, num_blocks)
    exists = (block >= 0) & (t >= first) & (t <= position)
    offset = tl.where(exists, block * state_page_stride + row * state_row_stride, 0)
    values, scores = load_row(lane, offset, exists)
    over = row + 1 >= block_size
    return values, scores, tl.where(over, column + 1, column), tl.where(over, 0, row + 1)


@triton.jit
def scan_any(
    state, dim, table_row, first, position, num_blocks, block_size, blocks_per_req, state_page_stride,
    state_row_stride, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A window over blocks of any size, row by row. A masked row reads the first row of all in its place."""
    top, weight, total = empty_state(BLOCK_D)
    lane = state + dim
    begin = first & -8
    column = floor_divide(begin, block_size)
    row = begin - column * block_size
    leaves = ((position - begin) >> 3).to(tl.int32) + 1
    for leaf in range(0, leaves):
        t = begin + leaf * 8
        v0, s0, column, row = any_row(lane, table_row, column, row, t, first, position, block_size, blocks_per_req, num_blocks, state_page_stride, state_row_stride)  # fmt: skip  # noqa: E501
        v1, s1, column, row = any_row(lane, table_row, column, row, t + 1, first, position, block_size, blocks_per_req, num_blocks, state_page_stride, state_row_stride)  # fmt: skip  # noqa: E501
        v2, s2, column, row = any_row(lane, table_row, column, row, t + 2, first, position, block_size, blocks_per_req, num_blocks, state_page_stride, state_row_stride)  # fmt: skip  # noqa: E501
        v3, s3, column, row = any_row(lane, table_row, column, row, t + 3, first, position, block_size, blocks_per_req, num_blocks, state_page_stride, state_row_stride)  # fmt: skip  # noqa: E501
        v4, s4, column, row = any_row(lane, table_row, column, row, t + 4, first, position, block_size, blocks_per_req, num_blocks, state_page_stride, state_row_stride)  # fmt: skip  # noqa: E501
        v5, s5, column, row = any_row(lane, table_row, column, row, t + 5, first, position, block_size, blocks_per_req, num_blocks, state_page_stride, state_row_stride)  # fmt: skip  # noqa: E501
        v6, s6, column, row = any_row(lane, table_row, column, row, t + 6, first, position, block_size, blocks_per_req, num_blocks, state_page_stride, state_row_stride)  # fmt: skip  # noqa: E501
        v7, s7, column, row = any_row(lane, table_row, column, row, t + 7, first, position, block_size, blocks_per_req, num_blocks, state_page_stride, state_row_stride)  # fmt: skip  # noqa: E501
        top, weight, total = fold_rows(
            top, weight, total, v0, v1, v2, v3, v4, v5, v6, v7, s0, s1, s2, s3, s4, s5, s6, s7
        )
    return mean(weight, total)


@triton.jit
def scan_blocks(
    state_cache, token_to_req, positions, boundary_token_indices, block_table, kv_slot_mapping, num_blocks,
    block_size, num_tokens, num_outputs, num_reqs, blocks_per_req, block_table_stride, max_pos, kv_pages,
    state_page_stride, state_row_stride, place, compressed,
    RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_SIZE: 8, or 0 for any. Two passes, for the unified buffer serves one after the other.

    First the whole windows over blocks of eight, BLOCK_D dimensions an item, as tiles of a block. Then all
    others row by row, CAREFUL dimensions an item; and every output's place.
    """
    GROUPS: tl.constexpr = HEAD_DIM // BLOCK_D
    CAREFUL: tl.constexpr = CAREFUL_D if BLOCK_SIZE > 0 and BLOCK_D > CAREFUL_D else BLOCK_D
    SHARES: tl.constexpr = HEAD_DIM // CAREFUL
    outputs = num_outputs.to(tl.int32)
    if BLOCK_SIZE > 0:
        block_size = block_size * 0 + BLOCK_SIZE
        dim = tl.arange(0, BLOCK_D)
        for item in range(tl.program_id(0), outputs * GROUPS, tl.num_programs(0)):
            item = tl.cast(item, tl.int32)
            output = (item // GROUPS).to(tl.int64)
            group = (item % GROUPS) * BLOCK_D
            table_row, first, rotary, slot, found = window(
                output, token_to_req, positions, boundary_token_indices, block_table, kv_slot_mapping,
                num_blocks, block_size, num_tokens, num_reqs, blocks_per_req, block_table_stride, max_pos,
                kv_pages, RATIO,
            )  # fmt: skip
            if (found == RATIO) & ((first & 7) == 0):
                sums = scan_whole(
                    state_cache + group, dim, table_row, first >> 3, state_page_stride, state_row_stride,
                    RATIO, BLOCK_D,
                )  # fmt: skip
                tl.store(compressed + output * HEAD_DIM + group + dim, sums)
    lane = tl.arange(0, CAREFUL)
    for item in range(tl.program_id(0), outputs * SHARES, tl.num_programs(0)):
        item = tl.cast(item, tl.int32)
        output = (item // SHARES).to(tl.int64)
        group = (item % SHARES) * CAREFUL
        table_row, first, rotary, slot, found = window(
            output, token_to_req, positions, boundary_token_indices, block_table, kv_slot_mapping, num_blocks,
            block_size, num_tokens, num_reqs, blocks_per_req, block_table_stride, max_pos, kv_pages, RATIO,
        )  # fmt: skip
        target = compressed + output * HEAD_DIM + group + lane
        if BLOCK_SIZE > 0:
            if (found > 0) & ((found < RATIO) | ((first & 7) != 0)):
                sums = scan_eight(
                    state_cache + group, lane, table_row, first, num_blocks, blocks_per_req,
                    state_page_stride, state_row_stride, RATIO, CAREFUL,
                )  # fmt: skip
                tl.store(target, sums)
        else:
            if found > 0:
                sums = scan_any(
                    state_cache + group, lane, table_row, first, first + (RATIO - 1), num_blocks, block_size,
                    blocks_per_req, state_page_stride, state_row_stride, CAREFUL,
                )  # fmt: skip
                tl.store(target, sums)
        if group == 0:
            store_place(place, output, tl.where(found > 0, slot, -1), rotary, first & 7, slot * 0)
