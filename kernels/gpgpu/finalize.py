"""The finish of one output: normalise, quantise, rotate, scatter 584 bytes."""

import triton
import triton.language as tl

from .. import contract

HEAD_DIM = tl.constexpr(contract.HEAD_DIM)
NOPE = tl.constexpr(contract.NOPE_HEAD_DIM)
GROUP = tl.constexpr(contract.QUANT_GROUP)
# An output is a tile [32, 16] here.
WIDTH = tl.constexpr(16)
TILES = tl.constexpr(32)
# The seven groups that are quantised and, as the eighth, the rotated one.
GROUPS = tl.constexpr(contract.HEAD_DIM // contract.QUANT_GROUP)
ROPE_PAIRS = tl.constexpr(contract.ROPE_PAIRS)
KV_BLOCK_SIZE = tl.constexpr(contract.KV_BLOCK_SIZE)
TOKEN_STRIDE = tl.constexpr(contract.TOKEN_STRIDE)
SCALE_DIM = tl.constexpr(contract.SCALE_DIM)
SCALE_OFFSET = tl.constexpr(contract.SCALE_OFFSET)
SCALE_BIAS = tl.constexpr(contract.SCALE_BIAS)
AMAX_FLOOR = tl.constexpr(contract.AMAX_FLOOR)


@triton.jit
def add_neighbours(x, COUNT: tl.constexpr):
    """[TILES, COUNT] -> [TILES, COUNT / 2]: one addition each, so no layout changes the result."""
    return tl.sum(tl.reshape(x, (TILES, COUNT // 2, 2)), axis=2)


@triton.jit
def halve(x, COUNT: tl.constexpr):
    return tl.sum(tl.reshape(x, (COUNT // 2, 2)), axis=1)


@triton.jit
def tile_sums(x):
    """The first four levels of a balanced tree of neighbouring pairs over 512: [TILES, WIDTH] -> [TILES]."""
    x = add_neighbours(add_neighbours(add_neighbours(add_neighbours(x, 16), 8), 4), 2)
    return tl.reshape(x, (TILES,))


@triton.jit
def sum_of_tiles(x):
    """The last five levels: [TILES] -> [1]."""
    return halve(halve(halve(halve(halve(x, 32), 16), 8), 4), 2)


@triton.jit
def round_to_bf16(x):
    """Bits of fp32 rounded to bf16, to nearest even, as i32; NaN stays NaN.

    On the bits, because Triton's interpreter and some vendor compilers truncate in the cast.
    """
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded) & 0xFFFF


@triton.jit
def from_bf16(bits):
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_weight(rms_norm_weight, weight_is_fp32, dim, BLOCK_SIZE: tl.constexpr):
    """The weights as fp32; only the general layout meets fp32 weights."""
    if BLOCK_SIZE > 0:
        return tl.load(rms_norm_weight + dim).to(tl.float32)
    else:
        narrow = weight_is_fp32 == 0
        low = tl.load(rms_norm_weight + dim, mask=(dim >= 0) & narrow, other=0.0).to(tl.float32)
        wide = rms_norm_weight.to(tl.pointer_type(tl.float32))
        high = tl.load(wide + dim, mask=(dim >= 0) & (weight_is_fp32 != 0), other=0.0)
        return tl.where(narrow, low, high)


@triton.jit
def load_rotation(cos_sin_cache, cos_sin_stride, rotary_position, dim):
    """Cosines and sines [TILES, WIDTH / 2] of the last group's pairs; the others' are never used."""
    even, odd = tl.split(tl.reshape(dim, (TILES, WIDTH // 2, 2)))
    pair = (even - NOPE) // 2
    angle = cos_sin_cache + rotary_position * cos_sin_stride + pair
    return tl.load(angle, mask=pair >= 0, other=1.0), tl.load(angle + ROPE_PAIRS, mask=pair >= 0, other=0.0)


@triton.jit
def finish(c, squares, exists, dim, slot, weight, cos, sin, kv_cache, kv_page_stride, rms_norm_eps):
    """Writes the slot of one output.

    c [32, 16] is the window's un-normalised vector, squares = tile_sums(c * c), dim = the indices.
    """
    mean = tl.sum(sum_of_tiles(squares), axis=0) * (1.0 / HEAD_DIM)
    rrms = tl.div_rn(1.0, tl.sqrt_rn(mean + rms_norm_eps))
    y = (c * rrms) * weight

    in_page = slot % KV_BLOCK_SIZE
    page = kv_cache + (slot // KV_BLOCK_SIZE) * kv_page_stride
    payload = page + in_page * TOKEN_STRIDE
    # One truth a tile row, so that the compiler may join the stores of neighbouring dimensions.
    exists = tl.max(exists.to(tl.int32), axis=1)[:, None] > 0

    z = from_bf16(round_to_bf16(y))
    amax = tl.max(tl.reshape(tl.abs(z), (GROUPS, GROUP)), axis=1)
    amax = tl.maximum(amax, AMAX_FLOOR)
    bits = amax.to(tl.int32, bitcast=True)
    # ceil(log2(amax / 127)) without a logarithm: 127 = 1.984375 * 2^6.
    exponent = ((bits >> 23) & 0xFF) - 127 - 6 + ((bits & 0x7FFFFF) > 0x7E0000).to(tl.int32)
    exponent = tl.reshape(tl.broadcast_to(exponent[:, None], (GROUPS, GROUP)), (TILES, WIDTH))
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = tl.minimum(tl.maximum(z * inverse, -127.0), 127.0)
    quantised = scaled.to(tl.int32).to(tl.int8).to(tl.uint8, bitcast=True)
    tl.store(payload + dim, quantised, mask=(dim < NOPE) & exists)

    # The scale byte of a group is stored with the group's first dimension; the eighth byte is 0.
    scale_byte = tl.where(dim < NOPE, exponent + SCALE_BIAS, 0).to(tl.uint8)
    scales = page + SCALE_OFFSET + in_page * SCALE_DIM
    tl.store(scales + dim // GROUP, scale_byte, mask=(dim % GROUP == 0) & exists)

    even, odd = tl.split(tl.reshape(y, (TILES, WIDTH // 2, 2)))
    turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    turned = round_to_bf16(tl.reshape(turned, (TILES, WIDTH))).to(tl.int16)
    rope = (payload + NOPE).to(tl.pointer_type(tl.int16))
    tl.store(rope + (dim - NOPE), turned, mask=(dim >= NOPE) & exists)
