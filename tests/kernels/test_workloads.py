"""The workloads' shapes, their traps, and that a seed gives the same operands every time."""

from __future__ import annotations

import pytest
import torch

from kvbuild.kernels.contract import OPERANDS, check_operands
from kvbuild.kernels.workloads import DECODE_WORKLOADS, WORKLOADS, Inputs, Workload, cos_sin, make


def _same(one: Inputs, other: Inputs) -> bool:
    return all(torch.equal(torch.nan_to_num(getattr(one, o.name).float()),
                           torch.nan_to_num(getattr(other, o.name).float())) for o in OPERANDS)


def test_the_twelve_workloads_in_the_contracts_order() -> None:
    shapes = [(w.num_reqs, w.total_tokens, w.compress_ratio) for w in WORKLOADS]
    assert shapes == [(n, t, c) for n, t in ((1, 8192), (4, 32768), (8, 65536), (8, 131072))
                      for c in (128, 256, 512)]
    assert all(w.num_outputs == w.total_tokens // w.compress_ratio for w in WORKLOADS)
    assert WORKLOADS[-1].window_bytes == 512 << 20
    assert len({w.name for w in (*WORKLOADS, *DECODE_WORKLOADS)}) == 27


def test_decode_steps_have_every_size_and_padding() -> None:
    assert [w.num_outputs for w in DECODE_WORKLOADS] == [0, 1, 3, 8, 32] * 3
    for workload in DECODE_WORKLOADS:
        boundary = make(workload).boundary_token_indices
        assert boundary.shape[0] == 40
        assert int((boundary >= 0).sum()) == workload.num_outputs


def test_a_prefill_has_an_output_at_every_boundary() -> None:
    inputs = make(Workload(3, 3 * 384, 128), seed=4)
    boundary = inputs.boundary_token_indices.tolist()
    wanted = [t for t in range(1152) if (int(inputs.positions[t]) + 1) % 128 == 0]
    assert boundary == wanted and len(wanted) == 9
    assert inputs.positions[boundary].tolist() == [127, 255, 383] * 3
    assert inputs.token_to_req[boundary].tolist() == [0] * 3 + [1] * 3 + [2] * 3
    slots = inputs.kv_slot_mapping
    assert slots[boundary].unique().shape[0] == 9
    assert int((slots >= 0).sum()) == 9
    assert inputs.block_table.flatten().unique().shape[0] == 144


def test_a_decode_step_ends_a_window_of_each_request_but_the_last() -> None:
    inputs = make(Workload.decode(8, 128), seed=4)
    p = inputs.positions
    assert ((p[:8] + 1) % 128 == 0).all() and (int(p[8]) + 1) % 128 != 0
    assert p[:8].unique().shape[0] > 1
    assert sorted(inputs.token_to_req.tolist()) == list(range(9))


@pytest.mark.parametrize("workload", [Workload(2, 512, 128), Workload.decode(3, 256)])
def test_a_seed_gives_the_same_operands(workload: Workload) -> None:
    one = make(workload, seed=7)
    assert _same(one, make(workload, seed=7))
    other = make(workload, seed=8)
    for name in ("state_cache", "block_table", "kv_cache", "rms_norm_weight", "kv_slot_mapping"):
        assert not torch.equal(getattr(one, name), getattr(other, name)), name


def test_layout_options() -> None:
    inputs = make(Workload(1, 256, 128), page_pad=16, row_pad=2, block_size=4, kv_page_stride=37442,
                  kv_columns=37376, kv_pages=3, padding=5, shuffle_blocks=False, weight_dtype=torch.float32)
    assert inputs.state_cache.shape[1:] == (4, 1024)
    assert inputs.state_cache.stride() == (4 * 1026 + 16, 1026, 1)
    assert tuple(inputs.kv_cache.shape) == (3, 37376) and inputs.kv_cache.stride() == (37442, 1)
    assert inputs.boundary_token_indices.tolist() == [127, 255, -1, -1, -1, -1, -1]
    assert inputs.block_table.tolist() == [list(range(64))]
    assert inputs.rms_norm_weight.dtype == torch.float32
    check_operands({o.name: getattr(inputs, o.name) for o in OPERANDS}, 4, 128)


def test_pads_and_spare_pages_hold_nan_and_the_rows_do_not() -> None:
    inputs = make(Workload(1, 256, 128), page_pad=16, row_pad=2)
    state = inputs.state_cache
    storage = torch.empty(0).set_(state.untyped_storage())
    whole = storage.view(state.shape[0], -1)
    assert bool(whole[:, 8 * 1026:].isnan().all())
    assert bool(whole[:, :8 * 1026].view(-1, 8, 1026)[..., 1024:].isnan().all())
    assert not bool(state[inputs.block_table.flatten().long()].isnan().any())
    spare = sorted(set(range(state.shape[0])) - set(inputs.block_table.flatten().tolist()))
    assert len(spare) == 2 and bool(state[spare].isnan().all())


def test_the_float_values_are_standard_normal() -> None:
    inputs = make(Workload(1, 1024, 128))
    rows = inputs.state_cache[inputs.block_table.flatten().long()]
    assert abs(float(rows.mean())) < 0.01 and abs(float(rows.std()) - 1.0) < 0.01


def test_fresh_inputs_share_nothing_that_a_launch_writes() -> None:
    inputs = make(Workload(1, 256, 128), kv_page_stride=37500, kv_columns=37376)
    fresh = inputs.fresh()
    assert fresh.kv_cache.stride() == inputs.kv_cache.stride()
    assert torch.equal(fresh.kv_cache, inputs.kv_cache)
    before = inputs.kv_storage.clone()
    fresh.kv_cache.add_(1)
    assert torch.equal(inputs.kv_storage, before)
    assert not torch.equal(fresh.kv_storage, before)


def test_the_arguments_come_in_the_contracts_order() -> None:
    inputs = make(Workload.decode(1, 512))
    arguments = inputs.call_args()
    assert len(arguments) == 12
    assert all(argument is getattr(inputs, o.name) for argument, o in zip(arguments, OPERANDS, strict=False))
    assert arguments[9:] == (8, 512, 1.0e-6)


def test_moving_to_another_device_keeps_the_layout() -> None:
    inputs = make(Workload.decode(2, 128), page_pad=16, kv_page_stride=37500, kv_columns=37376)
    moved = inputs.to("meta")
    for operand in OPERANDS:
        one, other = getattr(inputs, operand.name), getattr(moved, operand.name)
        assert other.device.type == "meta"
        assert (one.shape, one.stride(), one.storage_offset()) == (
            other.shape, other.stride(), other.storage_offset()), operand.name
    assert inputs.to("cpu") is inputs


def test_cosines_and_sines() -> None:
    table = cos_sin(4)
    assert table.dtype == torch.float32 and table[0].tolist() == [1.0] * 32 + [0.0] * 32
    torch.testing.assert_close(table[:, :32] ** 2 + table[:, 32:] ** 2, torch.ones(4, 32))
    assert float(table[1, 32]) == pytest.approx(0.8414709848)
