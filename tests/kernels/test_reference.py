"""The float32 reference, judged by the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbuild.kernels import reference
from kvbuild.kernels.contract import COMPRESS_RATIOS
from kvbuild.kernels.odd_cases import ODD_CASES, far_rows, odd_case, random_case, relocated
from kvbuild.kernels.oracle import expect
from kvbuild.kernels.reference import c128_256_512_compress, compress
from kvbuild.kernels.verdict import Verdict, changed_outside, judge, tie_refusals
from kvbuild.kernels.workloads import DECODE_WORKLOADS, WORKLOADS, Inputs, Workload, make


def _judged(inputs: Inputs) -> Verdict:
    after = inputs.fresh()
    assert compress(*after.call_args()) is after.kv_cache
    verdict = judge(after.kv_cache, inputs.kv_cache, expect(*inputs.call_args()))
    assert verdict.right and verdict.passes_challenge, str(verdict)
    assert changed_outside(after.kv_storage, inputs.kv_storage, inputs.kv_cache) == 0
    return verdict


@pytest.mark.parametrize("ratio", COMPRESS_RATIOS)
@pytest.mark.parametrize("name", ODD_CASES)
def test_odd_cases_are_right(name: str, ratio: int) -> None:
    _judged(odd_case(name, compress_ratio=ratio, seed=ratio))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), ratio=st.sampled_from(COMPRESS_RATIOS), block_size=st.integers(1, 20),
       num_reqs=st.integers(1, 4), num_blocks=st.integers(1, 30), page_pad=st.integers(0, 20),
       row_pad=st.integers(0, 5), kv_pad=st.integers(0, 100), gap=st.integers(0, 40),
       nonsense=st.sampled_from([0.0, 0.05, 0.3]))
def test_random_launches_are_right(seed: int, ratio: int, block_size: int, num_reqs: int, num_blocks: int,
                                   page_pad: int, row_pad: int, kv_pad: int, gap: int,
                                   nonsense: float) -> None:
    columns = 37376 + kv_pad
    _judged(random_case(seed, compress_ratio=ratio, block_size=block_size, num_reqs=num_reqs,
                        num_blocks=num_blocks, page_pad=page_pad, row_pad=row_pad, kv_columns=columns,
                        kv_page_stride=columns + columns % 2 + 2 * gap, nonsense=nonsense))


def test_decode_steps_are_right() -> None:
    for workload in DECODE_WORKLOADS[:7]:
        assert _judged(make(workload, seed=1)).outputs == workload.num_outputs


def test_a_workload_is_right_and_its_ties_are_few() -> None:
    verdicts = [_judged(make(WORKLOADS[0], seed=seed)) for seed in range(2)]
    assert not tie_refusals(sum(v.ties for v in verdicts), sum(v.bytes_compared for v in verdicts))


def test_rows_beyond_32_bit_products_are_right() -> None:
    inputs = far_rows()
    assert int(inputs.block_table.min()) * inputs.block_size * 1024 >= 1 << 31
    assert _judged(inputs).outputs == 4


def test_where_blocks_lie_changes_nothing() -> None:
    inputs = odd_case("masked_blocks")
    moved = relocated(inputs, seed=9)
    assert not torch.equal(moved.block_table, inputs.block_table)
    one, other = inputs.fresh(), moved.fresh()
    compress(*one.call_args())
    compress(*other.call_args())
    assert torch.equal(one.kv_storage, other.kv_storage)


def test_the_second_entry_point_writes_a_new_zeroed_tensor() -> None:
    inputs = odd_case("strided_kv")
    before = inputs.kv_storage.clone()
    result = c128_256_512_compress(*inputs.call_args())
    assert result.is_contiguous() and result.shape == inputs.kv_cache.shape
    assert torch.equal(inputs.kv_storage, before)
    assert judge(result, torch.zeros_like(result), expect(*inputs.call_args())).right
    empty = make(Workload.decode(0, 128))
    assert not bool(c128_256_512_compress(*empty.call_args()).any())


def test_chunks_change_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = odd_case("starts_before_zero")
    whole, chunked = inputs.fresh(), inputs.fresh()
    compress(*whole.call_args())
    monkeypatch.setattr(reference, "GATHER_LIMIT_BYTES", 1)
    compress(*chunked.call_args())
    assert torch.equal(whole.kv_storage, chunked.kv_storage)


def test_operands_outside_the_contract_are_refused() -> None:
    inputs = make(Workload.decode(1, 128))
    with pytest.raises(TypeError, match="positions: wanted dtype int64"):
        compress(*inputs.with_(positions=inputs.positions.int()).call_args())
    with pytest.raises(ValueError, match="block_size: wanted 8"):
        c128_256_512_compress(*inputs.with_(block_size=4).call_args())
