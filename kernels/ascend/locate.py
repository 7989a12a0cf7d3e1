"""Where an output's window lies and where its bytes go; scalar arithmetic, one output after the other."""

import triton
import triton.language as tl

from ..contract import KV_BLOCK_SIZE

PAGE_SLOTS = tl.constexpr(KV_BLOCK_SIZE)
PLACE = tl.constexpr(8)
# Row numbers are written in runs of at most this many.
RUN = tl.constexpr(64)


@triton.jit
def locate(
    output, token_to_req, positions, boundary_token_indices, kv_slot_mapping, num_tokens, num_reqs, max_pos,
    kv_pages, RATIO: tl.constexpr,
):  # fmt: skip
    """Request, position, rotary position and slot (-1: skip this output), all i64.

    Nothing is read outside its tensor, whatever the indices say.
    """
    token = tl.load(boundary_token_indices + output)
    request = token * 0
    position = request
    slot = request - 1
    if (token >= 0) & (token < num_tokens):
        request = tl.load(token_to_req + token).to(tl.int64)
        position = tl.load(positions + token)
        slot = tl.load(kv_slot_mapping + token)
    rotary = position & (-RATIO)
    wanted = (request >= 0) & (request < num_reqs) & (position >= 0) & (rotary < max_pos)
    wanted = wanted & (slot >= 0) & (slot < kv_pages * PAGE_SLOTS)
    return request, position, rotary, tl.where(wanted, slot, -1)


@triton.jit
def floor_divide(x, divisor):
    """x // divisor rounded down, for a negative x too; i64."""
    return tl.where(x < 0, x - (divisor - 1), x) // divisor


@triton.jit
def lookup(table_row, column, blocks_per_req, num_blocks):
    """The block in a column of the table, i64; -1 where there is none."""
    block = column * 0 - 1
    if (column >= 0) & (column < blocks_per_req):
        block = tl.load(table_row + column).to(tl.int64)
    return tl.where((block >= 0) & (block < num_blocks), block, -1)


@triton.jit
def store_place(place, output, slot, rotary, head, whole):
    """One output's place: see pipeline.intermediates."""
    mine = place + output * PLACE
    tl.store(mine, slot)
    tl.store(mine + 1, rotary)
    tl.store(mine + 2, head)
    tl.store(mine + 3, whole)


@triton.jit
def locate_rows(
    token_to_req, positions, boundary_token_indices, block_table, kv_slot_mapping, num_blocks, block_size,
    num_tokens, num_outputs, num_reqs, blocks_per_req, block_table_stride, max_pos, kv_pages, place, rows,
    live, RATIO: tl.constexpr,
):  # fmt: skip
    """First stage of index_select: `place`, and for each row of a window its number and whether it is live.

    The state cache is dense: row r of block b has the number b * block_size + r, below 2^31.
    """
    lane = tl.arange(0, RUN)
    for item in range(tl.program_id(0), num_outputs.to(tl.int32), tl.num_programs(0)):
        output = tl.cast(item, tl.int64)
        request, position, rotary, slot = locate(
            output, token_to_req, positions, boundary_token_indices, kv_slot_mapping, num_tokens, num_reqs,
            max_pos, kv_pages, RATIO,
        )  # fmt: skip
        first = position - (RATIO - 1)
        found = (output * 0).to(tl.int32)
        if slot < 0:
            for start in range(0, RATIO, RUN):
                tl.store(rows + output * RATIO + start + lane, tl.zeros([RUN], tl.int32))
        else:
            column = floor_divide(first, block_size)
            last = position // block_size
            table_row = block_table + request * block_table_stride
            for step in range(0, (last - column).to(tl.int32) + 1):
                here = column + step
                block = lookup(table_row, here, blocks_per_req, num_blocks)
                begin = here * block_size
                low = (tl.maximum(begin, first) - first).to(tl.int32)
                high = (tl.minimum(begin + (block_size - 1), position) - first).to(tl.int32) + 1
                exists = block >= 0
                number = tl.where(exists, block * block_size + (first - begin), 0).to(tl.int32)
                step_up = exists.to(tl.int32)
                found += step_up * (high - low)
                for start in range(low, high, RUN):
                    inside = lane < high - start
                    target = output * RATIO + start + lane
                    # Of a masked run every number is 0: lane and start count only where the block exists.
                    tl.store(rows + target, number + (lane + start) * step_up, mask=inside)
                    tl.store(live + target, tl.zeros([RUN], tl.float32) + step_up.to(tl.float32), mask=inside)
        store_place(
            place, output, tl.where(found > 0, slot, -1), rotary, first & 7, (found == RATIO).to(tl.int64)
        )
