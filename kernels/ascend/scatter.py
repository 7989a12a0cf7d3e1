"""Last stage of both routes: a slot's bytes into kv_cache. Bytes only; nothing is computed with them."""

import triton
import triton.language as tl

from .. import contract

KV_BLOCK_SIZE = tl.constexpr(contract.KV_BLOCK_SIZE)
TOKEN_STRIDE = tl.constexpr(contract.TOKEN_STRIDE)
SCALE_DIM = tl.constexpr(contract.SCALE_DIM)
SCALE_OFFSET = tl.constexpr(contract.SCALE_OFFSET)
PLACE = tl.constexpr(8)
# 576 bytes as a power of two and the rest.
LONG = tl.constexpr(512)
REST = tl.constexpr(64)


@triton.jit
def scatter_bytes(num_outputs, kv_cache, kv_page_stride, place, payload, scales):
    """One item is one slot; addresses in 64 bits."""
    long = tl.arange(0, LONG)
    rest = tl.arange(0, REST)
    scale = tl.arange(0, SCALE_DIM)
    for item in range(tl.program_id(0), num_outputs.to(tl.int32), tl.num_programs(0)):
        output = tl.cast(item, tl.int64)
        slot = tl.load(place + output * PLACE)
        if slot >= 0:
            page = kv_cache + (slot // KV_BLOCK_SIZE) * kv_page_stride
            in_page = slot % KV_BLOCK_SIZE
            source = payload + output * TOKEN_STRIDE
            target = page + in_page * TOKEN_STRIDE
            tl.store(target + long, tl.load(source + long))
            tl.store(target + LONG + rest, tl.load(source + LONG + rest))
            target_scales = page + SCALE_OFFSET + in_page * SCALE_DIM
            tl.store(target_scales + scale, tl.load(scales + output * SCALE_DIM + scale))
