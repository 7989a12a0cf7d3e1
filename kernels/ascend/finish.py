"""From weighted means to a slot's bytes: normalise, then quantise from bf16 bits in memory, and rotate."""

import triton
import triton.language as tl

from .. import contract

HEAD_DIM = tl.constexpr(contract.HEAD_DIM)
NOPE = tl.constexpr(contract.NOPE_HEAD_DIM)
ROPE = tl.constexpr(contract.ROPE_HEAD_DIM)
ROPE_PAIRS = tl.constexpr(contract.ROPE_PAIRS)
QUANT_GROUP = tl.constexpr(contract.QUANT_GROUP)
NUM_GROUPS = tl.constexpr(contract.NUM_GROUPS)
TOKEN_STRIDE = tl.constexpr(contract.TOKEN_STRIDE)
SCALE_DIM = tl.constexpr(contract.SCALE_DIM)
AMAX_FLOOR = tl.constexpr(contract.AMAX_FLOOR)
PLACE = tl.constexpr(8)


@triton.jit
def bf16_bits(x):
    """fp32 -> bf16 to nearest even, as the signed 16 bits in an i32; NaN stays NaN.

    On the bits: a cast's rounding is the compiler's. The arithmetic shift leaves what i16 can hold, so that
    narrowing is exact whether it wraps or saturates.
    """
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0)


@triton.jit
def halve(x, LENGTH: tl.constexpr):
    """[LENGTH] -> [LENGTH / 2], one addition each."""
    return tl.sum(tl.reshape(x, (2, LENGTH // 2)), axis=0)


@triton.jit
def sum_of_squares(x):
    """The squares of x [512], added in a fixed tree: fp32 scalar."""
    s = halve(halve(halve(x * x, 512), 256), 128)
    s = halve(halve(halve(s, 64), 32), 16)
    return tl.sum(s, axis=0)


@triton.jit
def load_weight(weight_bf16, weight_fp32, weight_is_fp32, first, LENGTH: tl.constexpr):
    """Weights from dimension `first` on, as fp32 [LENGTH]."""
    dim = tl.arange(0, LENGTH)
    # Of the one that it is not, nothing is read.
    wide_length = tl.where(weight_is_fp32 != 0, LENGTH, 0)
    wide = tl.load(weight_fp32 + first + dim, mask=dim < wide_length, other=0.0)
    narrow = tl.load(weight_bf16 + first + dim, mask=dim < LENGTH - wide_length, other=0.0).to(tl.float32)
    return tl.where(weight_is_fp32 != 0, wide, narrow)


@triton.jit
def normalise(
    num_outputs, weight_bf16, weight_fp32, weight_is_fp32, rms_norm_eps, place, compressed, normed, tail
):  # fmt: skip
    """bf16 bits of y [512] into `normed`, and its last 64 dimensions as fp32 into `tail`."""
    dim = tl.arange(0, HEAD_DIM)
    tail_dim = tl.arange(0, ROPE)
    weight = load_weight(weight_bf16, weight_fp32, weight_is_fp32, 0, HEAD_DIM)
    tail_weight = load_weight(weight_bf16, weight_fp32, weight_is_fp32, NOPE, ROPE)
    for item in range(tl.program_id(0), num_outputs.to(tl.int32), tl.num_programs(0)):
        output = tl.cast(item, tl.int64)
        slot = tl.load(place + output * PLACE)
        if slot >= 0:
            c = tl.load(compressed + output * HEAD_DIM + dim)
            rrms = 1.0 / tl.sqrt(sum_of_squares(c) * (1.0 / HEAD_DIM) + rms_norm_eps)
            tl.store(normed + output * HEAD_DIM + dim, bf16_bits((c * rrms) * weight).to(tl.int16))
            # Once more from memory: a slice of a vector is what not every lowering here has.
            last = tl.load(compressed + output * HEAD_DIM + NOPE + tail_dim)
            tl.store(tail + output * ROPE + tail_dim, (last * rrms) * tail_weight)


@triton.jit
def encode(
    num_outputs, cos_sin_cache, cos_sin_stride, place, normed, tail, payload, payload_words, scales
):  # fmt: skip
    """A slot's bytes: INT8 and scale bytes from bf16 bits in memory, and the rotated tail as bf16.

    payload and payload_words are the same memory. With a = max(max|z|, 1e-4) of a group, as bits: adding
    0x1FFFF carries into the exponent exactly where the mantissa passes 127's, so that no comparison,
    logarithm or power is needed.
    """
    group = tl.arange(0, 8)
    dim = group[:, None] * QUANT_GROUP + tl.arange(0, QUANT_GROUP)[None, :]
    real = group < NUM_GROUPS
    tail_dim = tl.arange(0, ROPE)
    pair = tl.arange(0, ROPE_PAIRS)
    for item in range(tl.program_id(0), num_outputs.to(tl.int32), tl.num_programs(0)):
        output = tl.cast(item, tl.int64)
        slot = tl.load(place + output * PLACE)
        if slot >= 0:
            bits = tl.load(normed + output * HEAD_DIM + dim).to(tl.int32) << 16
            z = bits.to(tl.float32, bitcast=True)
            largest = tl.maximum(tl.max(tl.abs(z), axis=1), AMAX_FLOOR)
            biased = ((largest.to(tl.int32, bitcast=True) + 0x1FFFF) >> 23) - 6
            inverse = ((254 - biased) << 23).to(tl.float32, bitcast=True)
            scaled = tl.minimum(tl.maximum(z * inverse[:, None], -127.0), 127.0)
            quantised = scaled.to(tl.int32).to(tl.int8)
            tl.store(payload + output * TOKEN_STRIDE + dim, quantised, mask=real[:, None])

            # As a signed byte: exact whether narrowing wraps or saturates.
            signed = biased - ((biased >> 7) << 8)
            tl.store(scales + output * SCALE_DIM + group, tl.where(real, signed, 0).to(tl.int8))

            angle = cos_sin_cache + tl.load(place + output * PLACE + 1) * cos_sin_stride
            cos = tl.load(angle + pair)
            sin = tl.load(angle + ROPE_PAIRS + pair)
            y = tl.load(tail + output * ROPE + tail_dim)
            even, odd = tl.split(tl.reshape(y, (ROPE_PAIRS, 2)))
            # A pair of bf16 values is one word, the even dimension low.
            low = bf16_bits(even * cos - odd * sin) & 0xFFFF
            high = bf16_bits(odd * cos + even * sin) << 16
            tl.store(payload_words + output * (TOKEN_STRIDE // 4) + NOPE // 4 + pair, low | high)
