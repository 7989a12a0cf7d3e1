"""The judge: every kind of planted fault is caught, true ties pass, and nothing beyond them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbuild.kernels.odd_cases import odd_case
from kvbuild.kernels.oracle import Expectation, encode, expect
from kvbuild.kernels.reference import compress
from kvbuild.kernels.verdict import MAX_FAULTS, Verdict, changed_outside, judge, tie_refusals
from kvbuild.kernels.workloads import Inputs, Workload, make

SKIPPED_SLOT, FREE_SLOT = 50, 51


def _launch() -> tuple[Inputs, Expectation, Tensor]:
    """Four outputs in slots 1, 63, 64 and 70 of two pages, and a fifth that is skipped; the bytes after."""
    inputs = make(Workload(1, 5 * 128, 128), seed=21, kv_pages=2)
    slots, requests = inputs.kv_slot_mapping.clone(), inputs.token_to_req.clone()
    token = inputs.boundary_token_indices
    slots[token] = torch.tensor([1, 63, 64, 70, SKIPPED_SLOT])
    requests[token[4]] = 9
    inputs = inputs.with_(kv_slot_mapping=slots, token_to_req=requests)
    oracle = expect(*inputs.call_args())
    after = inputs.kv_cache.clone()
    put(after, oracle, oracle.expected)
    return inputs, oracle, after


def put(kv: Tensor, oracle: Expectation, slot_bytes: Tensor) -> None:
    for output in oracle.written.nonzero().flatten().tolist():
        page, place = divmod(int(oracle.slot[output]), 64)
        kv[page, place * 576:place * 576 + 576] = slot_bytes[output, :576]
        kv[page, 36864 + place * 8:36872 + place * 8] = slot_bytes[output, 576:]


LAUNCH = _launch()


def _planted(page: int, offset: int, flip: int) -> Verdict:
    inputs, oracle, right = LAUNCH
    after = right.clone()
    after[page, offset] ^= flip
    return judge(after, inputs.kv_cache, oracle)


def test_the_oracles_own_bytes_are_right() -> None:
    inputs, oracle, after = LAUNCH
    verdict = judge(after, inputs.kv_cache, oracle)
    assert verdict.right and verdict.passes_challenge and not verdict.faults
    assert (verdict.outputs, verdict.excluded, verdict.differing, verdict.rope_error) == (4, 0, 0, 0.0)
    assert verdict.bytes_compared == 4 * 584
    assert verdict.bytes_compared + verdict.untouched_bytes == after.numel()


# (kind, output, page, offset); the outputs' slots are 1, 63, 64 = page 1 place 0, 70 = page 1 place 6.
PLANTED = [
    ("int8", 0, 0, 576), ("int8", 1, 0, 63 * 576 + 447), ("int8", 2, 1, 0), ("int8", 3, 1, 6 * 576 + 200),
    ("rope", 0, 0, 576 + 449), ("rope", 2, 1, 575),
    ("scale", 0, 0, 36864 + 8), ("scale", 3, 1, 36864 + 48 + 6),
    ("pad", 1, 0, 36864 + 63 * 8 + 7), ("pad", 2, 1, 36864 + 7),
    ("skipped", 4, 0, SKIPPED_SLOT * 576), ("skipped", 4, 0, 36864 + SKIPPED_SLOT * 8 + 7),
    ("untouched", -1, 0, FREE_SLOT * 576 + 575), ("untouched", -1, 0, 0), ("untouched", -1, 0, 36864),
    ("untouched", -1, 0, 37376), ("untouched", -1, 1, 37439),
]


@pytest.mark.parametrize("kind, output, page, offset", PLANTED)
def test_one_planted_byte_is_found_and_named(kind: str, output: int, page: int, offset: int) -> None:
    verdict = _planted(page, offset, 0x40)
    assert not verdict.right
    fault = verdict.faults[0]
    even = offset - offset % 2 if kind == "rope" else offset
    assert (fault.kind, fault.output, fault.page, fault.offset) == (kind, output, page, even)
    assert fault.wanted != fault.found
    if kind in ("skipped", "untouched"):
        assert (verdict.wrong, verdict.untouched_changed) == (0, 1)
    else:
        assert (verdict.wrong, verdict.untouched_changed) == (1, 0)
    # The challenge looks at the outputs' bytes only.
    assert verdict.passes_challenge == (kind in ("skipped", "untouched"))
    assert f"{kind}: " in str(verdict) and f"page {page}, byte {even}" in str(verdict)


@settings(max_examples=40, deadline=None)
@given(page=st.integers(0, 1), offset=st.integers(0, 37439), flip=st.integers(1, 255))
def test_any_flipped_byte_is_seen(page: int, offset: int, flip: int) -> None:
    verdict = _planted(page, offset, flip)
    assert verdict.differing + verdict.untouched_changed == 1
    assert not verdict.right or verdict.ties == 1


def test_every_output_byte_off_by_one_is_caught() -> None:
    """An off-by-one in the lowest bit, wherever the oracle's value is not at a tie."""
    inputs, oracle, right = LAUNCH
    low = encode(oracle.y - oracle.y_bound, oracle.rope - oracle.rope_bound)[0]
    high = encode(oracle.y + oracle.y_bound, oracle.rope + oracle.rope_bound)[0]
    firm = ((low == oracle.expected) & (high == oracle.expected))[0].tolist()
    assert sum(firm) > 570
    for byte in (*range(0, 576, 11), *range(576, 584)):
        slot_bytes = oracle.expected.clone()
        slot_bytes[0, byte] ^= 1
        after = right.clone()
        put(after, oracle, slot_bytes)
        verdict = judge(after, inputs.kv_cache, oracle)
        assert verdict.differing == 1
        if firm[byte] and (byte < 448 or byte >= 576):
            assert not verdict.right, byte


def test_an_output_that_was_not_written_is_wrong() -> None:
    inputs, oracle, _ = LAUNCH
    verdict = judge(inputs.kv_cache.clone(), inputs.kv_cache, oracle)
    assert verdict.wrong > 4 * 500 and verdict.rope_error > 1e-2
    assert len([fault for fault in verdict.faults if fault.kind == "int8"]) == MAX_FAULTS


def _single(y: dict[int, float], bound: dict[int, float], rope: dict[int, float] | None = None,
            rope_bound: dict[int, float] | None = None) -> Expectation:
    """One output in slot 0 whose other values are 100.3, far from any tie, without a bound."""
    def row(width: int, fill: float, values: dict[int, float] | None) -> Tensor:
        made = torch.full((1, width), fill, dtype=torch.float64)
        for index, value in (values or {}).items():
            made[0, index] = value
        return made

    ys, ropes = row(512, 100.3, y), row(64, 100.3, rope)
    expected, exponent = encode(ys, ropes)
    yes = torch.ones(1, dtype=torch.bool)
    return Expectation(yes, yes, torch.zeros(1, dtype=torch.int64), expected, ys, row(512, 0.0, bound), ropes,
                       row(64, 0.0, rope_bound), exponent)


def _judge_single(oracle: Expectation, changes: dict[int, int]) -> Verdict:
    before = torch.full((1, 37376), 0xA5, dtype=torch.uint8)
    slot_bytes = oracle.expected.clone()
    for byte, value in changes.items():
        slot_bytes[0, byte] = value
    after = before.clone()
    put(after, oracle, slot_bytes)
    return judge(after, before, oracle)


TIE = 5.0 - 2.0**-6  # between the bf16 values 5 - 2^-5 and 5; the codes are 4 and 5 under e = 0


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("distance, bound, accepted", [
    (1e-9, 2e-9, True), (-1e-9, 2e-9, True),
    (1e-9, 0.5e-9, False), (-1e-9, 0.5e-9, False), (1e-9, 0.0, False)])
def test_a_code_is_a_tie_within_its_own_bound_only(sign: float, distance: float, bound: float,
                                                   accepted: bool) -> None:
    oracle = _single({7: sign * (TIE + distance), 8: sign * TIE}, {7: bound})
    wanted = 5 if distance > 0 else 4
    assert oracle.expected[0, 7].item() == (int(sign) * wanted) & 0xFF
    verdict = _judge_single(oracle, {7: (int(sign) * (9 - wanted)) & 0xFF})
    assert (verdict.ties, verdict.wrong) == ((1, 0) if accepted else (0, 1))
    assert verdict.differing == 1 and verdict.right == accepted and verdict.passes_challenge == accepted


def test_a_tie_reaches_one_step_only() -> None:
    oracle = _single({7: TIE + 1e-9}, {7: 1e-8})
    assert _judge_single(oracle, {7: 4}).ties == 1
    assert _judge_single(oracle, {7: 3}).wrong == 1
    assert _judge_single(oracle, {7: 6}).wrong == 1


def test_a_neighbours_bound_excuses_nothing() -> None:
    oracle = _single({7: TIE + 1e-9}, {6: 1.0, 8: 1.0})
    assert _judge_single(oracle, {7: 4}).wrong == 1


# The maximum lies at the tie between 127 (e = 0) and 127.5 (e = 1).
MAX_TIE = 127.25


def test_a_scale_is_a_tie_where_the_groups_maximum_is() -> None:
    values = {64: MAX_TIE - 1e-9} | {d: 50.3 for d in range(65, 128)}
    oracle = _single(values, {64: 1e-8})
    assert oracle.expected[0, 577].item() == 127
    under_other_scale = {577: 128, 64: 63} | {d: 25 for d in range(65, 128)}
    verdict = _judge_single(oracle, under_other_scale)
    assert (verdict.ties, verdict.wrong) == (65, 0)
    # Under the other scale the codes are other ones: those of the first scale are wrong now, equal or not.
    assert _judge_single(oracle, {**under_other_scale, 100: 50}).wrong == 1
    assert _judge_single(oracle, {577: 128}).wrong == 64
    assert _judge_single(oracle, {577: 129}).wrong == 1
    assert _judge_single(oracle, {577: 126}).wrong == 1
    # Without the bound, or with another dimension's, the scale is not at a tie.
    for bound in ({}, {65: 1e-8}):
        firm = replace(oracle, y_bound=_single(values, bound).y_bound)
        assert _judge_single(firm, under_other_scale).wrong == 65


def test_a_group_that_may_be_zero_may_have_any_scale_down_to_the_floor() -> None:
    group = range(64, 128)
    oracle = _single({d: 0.5 for d in group}, {d: 0.6 for d in group})
    assert oracle.expected[0, 577].item() > 107
    zeros = {d: 0 for d in group}
    assert _judge_single(oracle, {577: 107, **zeros}).right
    assert _judge_single(oracle, {577: 106, **zeros}).wrong > 0


def test_another_dimension_can_hold_the_maximum_down() -> None:
    """One maximum at the tie and another firmly above it: the scale is not at a tie."""
    oracle = _single({64: MAX_TIE - 1e-9, 65: 200.0}, {64: 1e-8})
    assert oracle.expected[0, 577].item() == 128
    assert _judge_single(oracle, {577: 127}).wrong >= 1


def test_a_rope_value_is_a_tie_within_its_bound_only() -> None:
    value = 1.0 + 2.0**-8 + 1e-9  # rounds up to 0x3F81; below the tie is 0x3F80
    near = _single({}, {}, {3: value}, {3: 2e-9})
    assert near.expected[0, 448 + 6:448 + 8].tolist() == [0x81, 0x3F]
    verdict = _judge_single(near, {448 + 6: 0x80})
    assert (verdict.ties, verdict.wrong) == (1, 0) and verdict.passes_challenge
    assert _judge_single(near, {448 + 6: 0x82}).wrong == 1
    assert _judge_single(near, {448 + 7: 0xBF}).wrong == 1
    assert _judge_single(near, {448 + 6: 0xC0, 448 + 7: 0x7F}).rope_error == float("inf")
    far = _single({}, {}, {3: value}, {3: 0.5e-9})
    assert _judge_single(far, {448 + 6: 0x80}).wrong == 1


def test_a_rope_tie_may_differ_in_both_bytes() -> None:
    value = 2.0 - 2.0**-8 - 1e-9  # the tie between 0x3FFF and 0x4000
    near = _single({}, {}, {3: value}, {3: 2e-9})
    verdict = _judge_single(near, {448 + 6: 0x00, 448 + 7: 0x40})
    assert (verdict.differing, verdict.ties, verdict.wrong) == (2, 2, 0)


def test_a_rope_value_near_zero_may_have_either_sign() -> None:
    near = _single({}, {}, {0: 0.0, 1: 1e-12}, {1: 1e-7})
    assert _judge_single(near, {448 + 1: 0x80}).ties == 1
    small = int((torch.tensor([-5e-8]).view(torch.int32) >> 16).item()) & 0xFFFF
    assert _judge_single(near, {448 + 2: small & 0xFF, 448 + 3: small >> 8}).right
    large = int((torch.tensor([-2e-7]).view(torch.int32) >> 16).item()) & 0xFFFF
    assert not _judge_single(near, {448 + 2: large & 0xFF, 448 + 3: large >> 8}).right


def test_not_specified_outputs_are_excluded_and_their_neighbours_are_not() -> None:
    inputs = odd_case("foreign_floats_in_one_output")
    oracle = expect(*inputs.call_args())
    after = inputs.fresh()
    compress(*after.call_args())
    verdict = judge(after.kv_cache, inputs.kv_cache, oracle)
    assert verdict.right and (verdict.outputs, verdict.excluded) == (2, 4)
    for output in range(6):
        page, place = divmod(int(oracle.slot[output]), 64)
        spoilt = after.kv_cache.clone()
        spoilt[page, place * 576] ^= 0x40
        assert judge(spoilt, inputs.kv_cache, oracle).right == (not bool(oracle.specified[output]))


def test_a_slot_named_twice_is_not_specified_and_nothing_else_changes() -> None:
    inputs = make(Workload(1, 4 * 128, 128), seed=2)
    slots, token = inputs.kv_slot_mapping.clone(), inputs.boundary_token_indices
    slots[token] = torch.tensor([9, 5, 9, 7])
    inputs = inputs.with_(kv_slot_mapping=slots)
    oracle = expect(*inputs.call_args())
    after = inputs.fresh()
    compress(*after.call_args())
    verdict = judge(after.kv_cache, inputs.kv_cache, oracle)
    assert verdict.right and (verdict.outputs, verdict.excluded) == (2, 2)
    after.kv_cache[0, 9 * 576:10 * 576] = 1
    assert judge(after.kv_cache, inputs.kv_cache, oracle).right
    after.kv_cache[0, 10 * 576] ^= 1
    assert judge(after.kv_cache, inputs.kv_cache, oracle).untouched_changed == 1


def test_bytes_around_a_strided_cache_are_counted() -> None:
    inputs = make(Workload(1, 128, 128), kv_page_stride=37440, kv_columns=37376, kv_pages=2)
    after = inputs.fresh()
    after.kv_cache.add_(1)
    assert changed_outside(after.kv_storage, inputs.kv_storage, inputs.kv_cache) == 0
    for offset in (0, 255, 256 + 37376, 256 + 37439, -1):
        after.kv_storage[offset] ^= 1
    assert changed_outside(after.kv_storage, inputs.kv_storage, inputs.kv_cache) == 5


def test_how_many_ties_a_run_may_show() -> None:
    assert tie_refusals(0, 0, 0) == ()
    assert tie_refusals(99, 1_000_000, 100) == ()
    assert "1 in 10000 of 1000000 bytes, found 100" in tie_refusals(100, 1_000_000)[0]
    assert tie_refusals(22, 10_000_000, 10) == ()
    assert "1.5 times the reference's 10 plus 8, found 23" in tie_refusals(23, 10_000_000, 10)[0]
    assert len(tie_refusals(8, 100, 0)) == 2


def test_tensors_that_do_not_fit_are_refused() -> None:
    inputs, oracle, after = LAUNCH
    with pytest.raises(ValueError, match="kv_after: wanted kv_before's shape"):
        judge(after[:1], inputs.kv_cache, oracle)
    with pytest.raises(ValueError, match=r"kv_before: wanted uint8 \[kv_pages, at least 37376\]"):
        judge(after, inputs.kv_cache.int(), oracle)
