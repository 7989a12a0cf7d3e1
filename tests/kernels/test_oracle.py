"""The oracle against one output computed number by number, in plain Python."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from kvbuild.kernels import oracle as oracle_module
from kvbuild.kernels.odd_cases import ODD_CASES, odd_case, random_case
from kvbuild.kernels.oracle import expect
from kvbuild.kernels.workloads import Inputs, Workload, make

from .test_numerics import NOT_NEGATIVE, exact_exponent, nearest_bf16
from .test_windows import row_by_row


def _bf16(x: float) -> bytes:
    rounded = nearest_bf16(x)
    code = NOT_NEGATIVE.index(abs(rounded)) | (0x8000 if math.copysign(1.0, rounded) < 0 else 0)
    return code.to_bytes(2, "little")


def number_by_number(inputs: Inputs, output: int) -> tuple[int, bytes, list[float]] | None:
    """(slot, 584 bytes, bound of each y) of one output, as the contract tells it; None: skipped."""
    resolved = row_by_row(inputs, output)
    if resolved is None:
        return None
    slot, rope, places = resolved
    rows = [inputs.state_cache[place].tolist() for place in places if place is not None]
    c, size = [], []
    for d in range(512):
        scores = [row[512 + d] for row in rows]
        peak = max(scores)
        weights = [math.exp(s - peak) for s in scores]
        total = math.fsum(weights)
        terms = [w * row[d] if w else 0.0 for w, row in zip(weights, rows, strict=True)]
        c.append(math.fsum(terms) / total)
        size.append(math.fsum(map(abs, terms)) / total)
    rrms = 1.0 / math.sqrt(math.fsum(x * x for x in c) / 512 + inputs.rms_norm_eps)
    weight = inputs.rms_norm_weight.tolist()
    y = [x * rrms * w for x, w in zip(c, weight, strict=True)]
    bound = [2.0**-20 * (abs(v) + abs(w) * rrms * s) for v, w, s in zip(y, weight, size, strict=True)]

    codes, scales = bytearray(), bytearray()
    for group in range(7):
        z = [Fraction(nearest_bf16(v)) for v in y[64 * group:64 * group + 64]]
        e = exact_exponent(max(max(map(abs, z)), Fraction(1, 10_000)))
        scales.append(e + 127)
        codes += bytes(math.trunc(v / Fraction(2) ** e) & 0xFF for v in z)
    values = bytearray()
    cos_sin = inputs.cos_sin_cache[rope].tolist()
    for pair in range(32):
        u, v = y[448 + 2 * pair:450 + 2 * pair]
        cos, sin = cos_sin[pair], cos_sin[32 + pair]
        values += _bf16(u * cos - v * sin) + _bf16(v * cos + u * sin)
    return slot, bytes(codes + values + scales + b"\0"), bound


def _agree(inputs: Inputs, outputs: list[int]) -> None:
    found = expect(*inputs.call_args())
    for output in outputs:
        wanted = number_by_number(inputs, output)
        assert bool(found.written[output]) == (wanted is not None)
        if wanted is None:
            continue
        assert bool(found.specified[output])
        assert int(found.slot[output]) == wanted[0]
        assert found.expected[output].tolist() == list(wanted[1])
        torch.testing.assert_close(found.y_bound[output], torch.tensor(wanted[2], dtype=torch.float64),
                                   rtol=1e-9, atol=0.0)
        pairs = found.y_bound[output, 448:].view(32, 2).sum(1)
        assert torch.equal(found.rope_bound[output], pairs.repeat_interleave(2))


# The rest differ from these in their indices and layout only, which test_windows covers.
NUMERIC_CASES = ("starts_before_zero", "nan_in_masked_rows", "minus_inf_scores", "huge_scores",
                 "small_values", "cancelling_values", "odd_weight", "padded_rows", "masked_blocks")


@pytest.mark.parametrize("name", NUMERIC_CASES)
def test_odd_cases_agree_with_plain_arithmetic(name: str) -> None:
    inputs = odd_case(name, seed=3)
    _agree(inputs, list(range(inputs.boundary_token_indices.shape[0])))


@pytest.mark.parametrize("ratio", [256, 512])
def test_longer_windows_agree_with_plain_arithmetic(ratio: int) -> None:
    _agree(make(Workload.decode(2, ratio), seed=ratio), [0, 1, 2])


def test_random_launches_agree_with_plain_arithmetic() -> None:
    _agree(random_case(11, block_size=5, row_pad=3), list(range(8)))


def test_an_all_zero_window_is_zeros_under_scale_107() -> None:
    found = expect(*odd_case("zero_rows").call_args())
    assert bool(found.specified.all())
    zero = found.expected[1].tolist()
    assert zero[:448] == [0] * 448 and zero[576:] == [107] * 7 + [0]
    # Rotation by an angle beyond a quarter turn gives zeros of either sign.
    assert zero[448:576:2] == [0] * 64 and set(zero[449:576:2]) <= {0x00, 0x80}
    assert found.expected[2, 576].item() == 107


def test_foreign_floats_unspecify_their_output_alone() -> None:
    found = expect(*odd_case("foreign_floats_in_one_output").call_args())
    assert bool(found.written.all())
    assert found.specified.tolist() == [False, True, False, False, True, False]
    assert not bool(found.y.isnan().any())


@pytest.mark.parametrize("value, score", [
    (torch.nan, 0.0), (torch.inf, 0.0), (torch.inf, -torch.inf), (torch.nan, -torch.inf), (torch.inf, -2.0e4),
    (-torch.inf, 0.0), (0.0, torch.nan), (0.0, torch.inf), (1.0, torch.inf)])
def test_one_foreign_float_in_a_live_row_unspecifies_the_output(value: float, score: float) -> None:
    inputs = make(Workload(1, 256, 128))
    state = inputs.state_cache.clone()
    page = inputs.block_table[0, 3]
    state[page, 2, 40], state[page, 2, 552] = value, score
    found = expect(*inputs.with_(state_cache=state).call_args())
    assert found.written.tolist() == [True, True] and found.specified.tolist() == [False, True]


def test_a_dimension_whose_scores_are_all_minus_inf_is_not_specified() -> None:
    inputs = odd_case("mixed_padding")
    state = inputs.state_cache.clone()
    state[..., 512 + 77] = -torch.inf
    found = expect(*inputs.with_(state_cache=state).call_args())
    assert not bool(found.specified.any())


def _cancelling(inputs: Inputs) -> dict[str, torch.Tensor]:
    """A dimension of +-3e38 under equal weights: its sum is 0, but no float32 sum gets there for sure."""
    state = inputs.state_cache.clone()
    state[..., 512] = 1.0
    state[:, 0::2, 0], state[:, 1::2, 0] = 3.0e38, -3.0e38
    return {"state_cache": state}


@pytest.mark.parametrize("change", [
    _cancelling,
    lambda i: {"state_cache": i.state_cache * 1.0e-25, "rms_norm_eps": 0.0},
    lambda i: {"rms_norm_weight": torch.cat((i.rms_norm_weight[:1] * torch.inf, i.rms_norm_weight[1:]))},
    lambda i: {"state_cache": i.state_cache * 1.0e19},
    lambda i: {"state_cache": i.state_cache * 0.0, "rms_norm_eps": 0.0},
    lambda i: {"cos_sin_cache": i.cos_sin_cache * torch.nan},
    lambda i: {"rms_norm_weight": i.rms_norm_weight * torch.inf},
])
def test_what_leaves_float32_is_not_specified(change: object) -> None:
    inputs = make(Workload.decode(1, 128))
    found = expect(*inputs.with_(**change(inputs)).call_args())  # type: ignore[operator]
    assert bool(found.written[0]) and not bool(found.specified[0])


def test_chunks_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(Workload(2, 1024, 128), seed=5)
    whole = expect(*inputs.call_args())
    monkeypatch.setattr(oracle_module, "_CHUNK_BYTES", {"cpu": 1})
    single = expect(*inputs.call_args())
    assert torch.equal(whole.expected, single.expected)
    torch.testing.assert_close(whole.y, single.y, rtol=1e-13, atol=1e-13)


def test_the_operands_stay_as_they_are() -> None:
    for name in ODD_CASES:
        inputs = odd_case(name)
        kept = inputs.fresh()
        state = inputs.state_cache.clone()
        expect(*inputs.call_args())
        assert torch.equal(kept.kv_storage, inputs.kv_storage)
        assert torch.equal(state.view(torch.int32), inputs.state_cache.view(torch.int32))
