"""The contract's exact steps on tensors: bf16 rounding on the bits, and the group exponent.

No step here leans on a backend's casts, logarithms or divisions, so each gives the same bits on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .contract import AMAX_FLOOR, EXPONENT_MANTISSA_LIMIT

_F32_SIGN_EXPONENT_TOP7 = -0x10000
_F64_DROPPED_BITS = 52 - 7
_BF16_SMALLEST_NORMAL = 2.0**-126
_BF16_SUBNORMAL_STEPS_PER_ONE = 2.0**133


def round_to_bf16(x: Tensor) -> Tensor:
    """Rounds float32 to the nearest bf16, ties to even; float32 again. NaN stays NaN, +-inf stays."""
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & _F32_SIGN_EXPONENT_TOP7
    return torch.where(x.isnan(), x, rounded.view(torch.float32))


def round_to_bf16_from_f64(x: Tensor) -> Tensor:
    """Rounds float64 to the nearest bf16 in one step, ties to even; the values as float32.

    One step: going through float32 would round twice and move values near a tie.
    """
    bits = x.contiguous().view(torch.int64)
    half = (1 << (_F64_DROPPED_BITS - 1)) - 1
    kept = ((bits + (half + ((bits >> _F64_DROPPED_BITS) & 1))) >> _F64_DROPPED_BITS) << _F64_DROPPED_BITS
    normal = kept.view(torch.float64)
    subnormal = torch.round(x * _BF16_SUBNORMAL_STEPS_PER_ONE) / _BF16_SUBNORMAL_STEPS_PER_ONE
    value = torch.where(x.abs() < _BF16_SMALLEST_NORMAL, subnormal, normal)
    return torch.where(x.isfinite(), value, x).to(torch.float32)


def bf16_bits(x: Tensor) -> Tensor:
    """The 16 bits (int32, 0 to 65535) of float32 values that bf16 holds exactly."""
    return (x.contiguous().view(torch.int32) >> 16) & 0xFFFF


def bf16_bytes(x: Tensor) -> Tensor:
    """The bytes, low one first, of float32 [..., n] values that bf16 holds exactly: uint8 [..., 2n]."""
    bits = bf16_bits(x)
    return torch.stack((bits & 0xFF, bits >> 8), dim=-1).flatten(-2).to(torch.uint8)


def group_exponent(amax: Tensor) -> Tensor:
    """`ceil(log2(max(amax, 1e-4) / 127))`, exactly, of float32 values that bf16 holds; int32.

    `amax` is finite and not negative.
    """
    bits = amax.clamp(min=AMAX_FLOOR).contiguous().view(torch.int32)
    above = (bits & 0x7FFFFF) > EXPONENT_MANTISSA_LIMIT
    return (bits >> 23) - (127 + 6) + above.to(torch.int32)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float32, exactly, for int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


def quantise(z: Tensor, exponent: Tensor) -> Tensor:
    """int8 codes of float32 `z` under 2^exponent (broadcast): truncated towards zero, within +-127."""
    return (z * power_of_two(-exponent)).clamp(-127.0, 127.0).trunc().to(torch.int8)
