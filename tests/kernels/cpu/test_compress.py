"""The host kernel's bytes against the oracle, and its one order of summation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbuild.kernels import reference
from kvbuild.kernels.contract import COMPRESS_RATIOS, HEAD_DIM
from kvbuild.kernels.odd_cases import ODD_CASES, far_rows, odd_case, relocated
from kvbuild.kernels.oracle import expect
from kvbuild.kernels.verdict import judge, tie_refusals
from kvbuild.kernels.workloads import WORKLOADS, Inputs, Workload, make


@pytest.mark.parametrize("workload", WORKLOADS[:3], ids=lambda w: w.name)
def test_smallest_workloads(kernel: Any, workload: Workload) -> None:
    x = make(workload)
    after, beside = x.fresh(), x.fresh()
    kernel(after)
    reference.compress(*beside.call_args())
    oracle = expect(*x.call_args())
    verdict = judge(after.kv_cache, x.kv_cache, oracle)
    assert verdict.right and verdict.passes_challenge, str(verdict)
    ties_of_reference = judge(beside.kv_cache, x.kv_cache, oracle).ties
    refusals = tie_refusals(verdict.ties, max(verdict.bytes_compared, 10_000 * 9), ties_of_reference)
    assert not refusals, refusals


@pytest.mark.parametrize("outputs", (0, 1, 3, 8))
def test_decode_steps_with_padding(kernel: Any, outputs: int) -> None:
    kernel.check(make(Workload.decode(outputs, 256)))


@pytest.mark.parametrize("name", ODD_CASES)
def test_odd_cases(kernel: Any, name: str) -> None:
    x = odd_case(name, compress_ratio=256)
    kernel.check(x)
    assert kernel.fresh(relocated(x, 1)) == kernel.fresh(x)


def test_rows_beyond_32_bits(kernel: Any) -> None:
    kernel.check(far_rows())


CUTS: dict[str, Callable[[Inputs], Inputs]] = {
    "tokens": lambda x: x.with_(token_to_req=x.token_to_req[:-1], positions=x.positions[:-1],
                                kv_slot_mapping=x.kv_slot_mapping[:-1]),
    "requests": lambda x: x.with_(block_table=x.block_table[:1]),
    "columns": lambda x: x.with_(block_table=x.block_table[:, :-1]),
    "blocks": lambda x: x.with_(state_cache=x.state_cache[:30]),
    "angles": lambda x: x.with_(cos_sin_cache=x.cos_sin_cache[:-1]),
    "pages": lambda x: x.with_(kv_cache=x.kv_cache[:1]),
}  # fmt: skip


@pytest.mark.parametrize("name", CUTS)
def test_what_lies_behind_an_operand_is_not_used(kernel: Any, name: str) -> None:
    whole = make(Workload(2, 512, 128), seed=17, kv_pages=2)
    x = CUTS[name](whole)
    kernel.check(x)
    assert kernel.fresh(x) != kernel.fresh(whole)


CHANGES = ("none", "none", "shift", "boundary", "request", "position", "slot", "table")
NONSENSE = (-(2**63), -(2**31) - 1, -513, -1, 2**20, 2**31, 2**31 + 7, 2**62, 2**63 - 1)


@st.composite
def launches(draw: st.DrawFn) -> Inputs:
    """Small launches of any layout, some of whose indices make no sense."""
    ratio = draw(st.sampled_from(COMPRESS_RATIOS))
    num_reqs, windows = draw(st.sampled_from(((1, 1), (1, 2), (2, 1), (3, 1))))
    x = make(
        Workload(num_reqs, num_reqs * windows * ratio, ratio),
        seed=draw(st.integers(0, 2**31)),
        page_pad=draw(st.sampled_from((0, 16, 5))),
        row_pad=draw(st.sampled_from((0, 8, 1))),
        kv_page_stride=draw(st.sampled_from((37376, 37378, 37440))),
        kv_columns=37376,
        block_size=draw(st.sampled_from((1, 2, 3, 7, 8, 16, 64, 100, 513, 1000))),
        padding=draw(st.integers(0, 3)),
        weight_dtype=draw(st.sampled_from((torch.bfloat16, torch.float32))),
    )
    boundaries, n = x.boundary_token_indices, num_reqs * windows
    for output in range(n):
        token = int(boundaries[output])
        match draw(st.sampled_from(CHANGES)):
            case "shift":  # partly masked windows, or past the end of the table
                x.positions[token] += draw(st.integers(-ratio + 1, 3 * ratio))
            case "boundary":
                boundaries[output] = draw(st.sampled_from((x.positions.shape[0], *NONSENSE)))
            case "request":
                x.token_to_req[token] = draw(st.sampled_from((num_reqs, -1, -(2**31), 2**31 - 1)))
            case "position":
                x.positions[token] = draw(st.sampled_from(NONSENSE))
            case "slot":
                x.kv_slot_mapping[token] = draw(st.sampled_from((x.kv_cache.shape[0] * 64, *NONSENSE)))
            case "table":
                columns = x.block_table.shape[1]
                first = draw(st.integers(0, columns - 1))
                last = draw(st.integers(first + 1, columns))
                bad = (-1, x.state_cache.shape[0], -(2**31), 2**31 - 1)
                x.block_table[:, first:last] = draw(st.sampled_from(bad))
    if draw(st.booleans()):  # a table and a cosine cache with rows further apart, an odd half-word address
        wide = torch.full((x.block_table.shape[0], x.block_table.shape[1] + 3), 7, dtype=torch.int32)
        wide[:, :-3] = x.block_table
        angles = torch.full((x.cos_sin_cache.shape[0], 70), torch.nan)
        angles[:, :64] = x.cos_sin_cache
        kv = x.kv_cache
        moved = x.kv_storage.as_strided(kv.shape, kv.stride(), kv.storage_offset() + 2)
        x = x.with_(block_table=wide[:, :-3], cos_sin_cache=angles[:, :64], kv_cache=moved)
    return x


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(x=launches())
def test_any_launch(kernel: Any, x: Inputs) -> None:
    kernel.check(x)


@pytest.mark.parametrize("scale", (0.0, 1e-3, 40.0, 1e30))
def test_any_size_of_scores(kernel: Any, scale: float) -> None:
    x = make(Workload(1, 256, 128), seed=3)
    x.state_cache[..., HEAD_DIM:] *= scale
    kernel.check(x)


def test_tiny_weights_still_count(kernel: Any) -> None:
    x = make(Workload(1, 128, 128), seed=4)
    x.state_cache[..., :HEAD_DIM] *= 1e6
    x.state_cache[..., HEAD_DIM:] = -86.0  # a weight of 2^-124
    x.state_cache[int(x.block_table[0, 0]), 0] = 0.0
    oracle = expect(*x.call_args())
    assert bool(oracle.specified.all()) and 0.0 < float(oracle.rope.abs().max()) < 1e-26
    kernel.check(x)


def test_minus_infinity_weighs_nothing(kernel: Any) -> None:
    x = make(Workload(1, 384, 128), seed=5)
    scores = x.state_cache[..., HEAD_DIM:]
    scores[torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)) < 0.7] = -torch.inf
    scores[..., 0] = -torch.inf  # all but one row a window
    for page in (int(x.block_table[0, column]) for column in range(3, x.block_table.shape[1], 16)):
        scores[page, 2, 0] = -5.0
    assert bool(expect(*x.call_args()).specified.all())
    kernel.check(x)


@pytest.mark.parametrize("poison", (torch.nan, torch.inf))
def test_poison_stays_in_its_output(kernel: Any, poison: float) -> None:
    x = make(Workload(1, 512, 128), seed=6)
    page = int(x.block_table[0, 20])  # in the second window
    for half in (slice(0, HEAD_DIM), slice(HEAD_DIM, None)):
        y = x.with_(state_cache=x.state_cache.clone())
        y.state_cache[page, 3, half] = poison
        assert expect(*y.call_args()).specified.tolist() == [True, False, True, True]
        kernel.check(y)


def rounding_noise(num_outputs: int, ratio: int, **options: Any) -> Inputs:
    """Windows whose weighted sum is 0 but for the rounding of each step, which makes up every byte."""
    x = make(Workload(1, num_outputs * ratio, ratio), shuffle_blocks=False, **options)
    rows = x.state_cache[: num_outputs * ratio // 8].view(num_outputs, ratio, 2 * HEAD_DIM)
    half = ratio // 2
    rows[..., :HEAD_DIM] *= 1e6
    rows[:, half:] = rows[:, :half].flip(1)
    rows[:, half:, :HEAD_DIM] *= -1.0
    return x


@pytest.mark.parametrize("ratio", COMPRESS_RATIOS)
def test_every_level_gives_the_same_bytes(
    kernel: Any, levels: tuple[str, ...], ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = rounding_noise(4, ratio, seed=7)
    x.state_cache[::3, :, HEAD_DIM:] *= 30.0  # weights of 0 among them
    found = set()
    for level in levels:
        monkeypatch.setenv("KVBUILD_CPU_ISA", level)
        found.add(kernel.fresh(x))
    assert len(found) == 1


def test_an_output_has_the_same_bytes_alone_and_in_a_batch(kernel: Any) -> None:
    x = rounding_noise(300, 128, seed=10, padding=0)
    whole = x.fresh()
    kernel(whole)
    apart = x.fresh()
    for output in range(0, 300, 7):
        kernel(apart.with_(boundary_token_indices=x.boundary_token_indices[output:output + 1].clone()))
    few = x.with_(boundary_token_indices=x.boundary_token_indices[::7].clone())
    assert kernel(apart) == kernel(whole)
    after = few.fresh()
    kernel(after)
    slots = x.kv_slot_mapping[few.boundary_token_indices]
    for page, place in zip((slots // 64).tolist(), (slots % 64).tolist(), strict=True):
        payload, scales = slice(576 * place, 576 * place + 576), slice(36864 + 8 * place, 36872 + 8 * place)
        assert torch.equal(after.kv_cache[page, payload], whole.kv_cache[page, payload])
        assert torch.equal(after.kv_cache[page, scales], whole.kv_cache[page, scales])


def test_bytes_do_not_depend_on_where_the_rows_lie(kernel: Any) -> None:
    x = rounding_noise(2, 512, seed=11)
    rows = x.state_cache[:128].reshape(1024, 2 * HEAD_DIM)
    order = torch.randperm(205, generator=torch.Generator().manual_seed(2))
    pages = torch.full((205, 5, 2 * HEAD_DIM + 3), torch.nan)
    for column, page in enumerate(order.tolist()):
        part = rows[5 * column:5 * column + 5]
        pages[page, :part.shape[0], :2 * HEAD_DIM] = part
    table = order[None].to(torch.int32)
    moved = x.with_(state_cache=pages[..., :2 * HEAD_DIM], block_size=5, block_table=table)
    assert kernel.fresh(moved) == kernel.fresh(x)


def test_the_callers_float_mode_changes_nothing(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBUILD_NUM_THREADS", "1")  # all of it in the thread with the mode
    x = make(Workload(1, 256, 128), seed=12)
    x.state_cache[..., :HEAD_DIM] *= 1e-38  # terms below the normal range
    wanted = kernel.fresh(x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no mode that flushes subnormals")
    try:
        assert kernel.fresh(x) == wanted
        assert float(torch.tensor(1e-39) * 1.0) == 0.0, "the caller's own mode was not restored"
    finally:
        torch.set_flush_denormal(False)


def test_aarch64_gives_the_same_bytes(kernel: Any, run_program: Callable[..., bytes]) -> None:
    x = rounding_noise(3, 256, seed=16, padding=2)
    assert run_program("aarch64", x) == kernel.fresh(x)


def test_other_ratios_and_page_sizes_are_refused(kernel: Any) -> None:
    x = make(Workload.decode(1, 128))
    with pytest.raises(ValueError, match="compress_ratio: wanted 128, 256 or 512, found 64"):
        kernel(x.with_(compress_ratio=64))
    with pytest.raises(ValueError, match="block_size: wanted at least 1, found 0"):
        kernel(x.with_(block_size=0))
