"""The exact steps, against exact rational arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbuild.kernels.numerics import (
    bf16_bits,
    bf16_bytes,
    group_exponent,
    power_of_two,
    quantise,
    round_to_bf16,
    round_to_bf16_from_f64,
)

ALL_BITS = torch.arange(0x10000, dtype=torch.int32)
ALL_VALUES = (ALL_BITS << 16).view(torch.float32)
NOT_NEGATIVE = ALL_VALUES[:0x7F80].tolist()


def exact_exponent(a: Fraction) -> int:
    """The least e with a <= 127 * 2^e."""
    e = a.numerator.bit_length() - a.denominator.bit_length() - 8
    while a > 127 * Fraction(2) ** e:
        e += 1
    return e


def nearest_bf16(x: float) -> float:
    """The nearest bf16 in exact arithmetic, ties to the even code."""
    above = bisect_left(NOT_NEGATIVE, abs(x))
    if above == len(NOT_NEGATIVE):
        infinity = Fraction(2) ** 128
        nearer = infinity - Fraction(abs(x)) > Fraction(abs(x)) - Fraction(NOT_NEGATIVE[-1])
        return (NOT_NEGATIVE[-1] if nearer else float("inf")) * (1.0 if x > 0 else -1.0)
    below = max(above - 1, 0)
    up = Fraction(NOT_NEGATIVE[above]) - Fraction(abs(x))
    down = Fraction(abs(x)) - Fraction(NOT_NEGATIVE[below])
    code = above if up < down or (up == down and above % 2 == 0) else below
    return NOT_NEGATIVE[code] * (1.0 if x > 0 else -1.0)


def test_the_exponent_is_exact_on_every_bf16_value() -> None:
    values = [v for v in NOT_NEGATIVE if v >= 1.0e-4]
    assert len(values) == 18_094
    found = group_exponent(torch.tensor(values)).tolist()
    assert found == [exact_exponent(Fraction(v)) for v in values]


def test_the_exponent_at_the_floor_and_where_logarithms_go_wrong() -> None:
    assert (group_exponent(torch.tensor([0.0, 5.0e-5, 1.0e-4])) + 127).tolist() == [107, 107, 107]
    assert group_exponent(torch.tensor([0.003875732421875, 0.0155029296875])).tolist() == [-15, -13]
    exact = torch.tensor([127.0 * 2.0**k for k in range(-20, 121)])
    assert group_exponent(exact).tolist() == list(range(-20, 121))


def test_powers_of_two_are_exact() -> None:
    e = torch.arange(-126, 128, dtype=torch.int32)
    assert power_of_two(e).tolist() == [2.0**k for k in e.tolist()]


def test_codes_are_truncated_and_never_leave_the_range() -> None:
    z = torch.tensor([0.99, -0.99, 1.5, -1.5, 126.5, -127.0])
    assert quantise(z, torch.zeros(6, dtype=torch.int32)).tolist() == [0, 0, 1, -1, 126, -127]
    values = ALL_VALUES[(ALL_VALUES >= 1.0e-4) & ALL_VALUES.isfinite()]
    codes = quantise(values, group_exponent(values))
    assert int(codes.min()) >= 63 and int(codes.max()) == 127


def test_float32_rounding_keeps_bf16_values_and_special_ones() -> None:
    finite = ALL_VALUES[~ALL_VALUES.isnan()]
    assert torch.equal(bf16_bits(round_to_bf16(finite)), ALL_BITS[~ALL_VALUES.isnan()])
    assert bool(round_to_bf16(torch.tensor([torch.nan, -torch.nan])).isnan().all())
    # A NaN whose payload sits in the low bits only must not turn into infinity.
    small_payload = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    assert bool(round_to_bf16(small_payload).isnan().all())


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_float32_rounding_is_to_nearest_even(x: float) -> None:
    assert round_to_bf16(torch.tensor([x])).item() == nearest_bf16(x)


@given(st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(min_value=-1.0e-37, max_value=1.0e-37),
    st.floats(min_value=-4.0e38, max_value=4.0e38)))
def test_float64_rounding_is_to_nearest_even(x: float) -> None:
    assert round_to_bf16_from_f64(torch.tensor([x], dtype=torch.float64)).item() == nearest_bf16(x)


@given(st.integers(1, 0x7F7E), st.sampled_from([0.0, 2.0**-40, -(2.0**-40), 2.0**-50, -(2.0**-50)]))
def test_float64_rounding_around_every_tie(code: int, nudge: float) -> None:
    tie = (NOT_NEGATIVE[code] + NOT_NEGATIVE[code + 1]) / 2
    x = tie * (1.0 + nudge)
    assert round_to_bf16_from_f64(torch.tensor([x, -x], dtype=torch.float64)).tolist() == [
        nearest_bf16(x), nearest_bf16(-x)]


def test_float64_rounding_is_not_done_twice() -> None:
    x = torch.tensor([1.0 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert round_to_bf16_from_f64(x).item() == 1.0 + 2.0**-7
    assert round_to_bf16(x.to(torch.float32)).item() == 1.0


def test_float64_rounding_of_special_values() -> None:
    special = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, torch.nan], dtype=torch.float64)
    bits = bf16_bits(round_to_bf16_from_f64(special)).tolist()
    assert bits[:4] == [0x7F80, 0xFF80, 0x0000, 0x8000]
    assert bits[4] & 0x7FFF > 0x7F80


def test_bytes_are_little_endian() -> None:
    assert bf16_bytes(torch.tensor([[1.0, -2.0]])).tolist() == [[0x80, 0x3F, 0x00, 0xC0]]
