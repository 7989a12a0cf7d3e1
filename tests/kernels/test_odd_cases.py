"""Each odd case holds the oddity its name promises: a case that lost it would pass for the wrong reason."""

from __future__ import annotations

from kvbuild.kernels.odd_cases import ODD_CASES, odd_case, random_case
from kvbuild.kernels.oracle import expect
from kvbuild.kernels.windows import Windows, resolve
from kvbuild.kernels.workloads import Inputs


def _windows(inputs: Inputs) -> Windows:
    return resolve(inputs.token_to_req, inputs.positions, inputs.boundary_token_indices, inputs.block_table,
                   inputs.kv_slot_mapping, num_blocks=inputs.state_cache.shape[0],
                   block_size=inputs.block_size, compress_ratio=inputs.compress_ratio,
                   kv_pages=inputs.kv_cache.shape[0], max_pos=inputs.cos_sin_cache.shape[0])


def test_cases_write_what_they_should() -> None:
    written = {name: int(_windows(odd_case(name)).written.sum()) for name in ODD_CASES}
    assert written.pop("no_outputs") == written.pop("no_requests") == 0
    assert written.pop("nan_in_masked_rows") == 1
    assert written.pop("nonsense_indices") == 3
    assert written.pop("foreign_floats_in_one_output") == 6
    assert set(written.values()) == {4}


def test_windows_that_start_before_zero() -> None:
    live = _windows(odd_case("starts_before_zero")).live.sum(1).tolist()
    assert live == [1, 6, 127, 128]


def test_masked_rows_sit_between_live_ones_and_meet_nan_if_read() -> None:
    inputs = odd_case("masked_blocks")
    windows = _windows(inputs)
    assert bool(windows.live.any(1).all()) and bool((~windows.live).any(1).all())
    assert bool(inputs.state_cache[0].isnan().all())
    assert bool(expect(*inputs.call_args()).specified.all())


def test_nonsense_reaches_half_masked_windows_too() -> None:
    windows = _windows(odd_case("nonsense_indices"))
    live = windows.live[windows.written].sum(1).tolist()
    assert sorted(live) == [63, 128, 128]


def test_all_cases_but_one_are_specified_throughout() -> None:
    for name in ODD_CASES:
        for ratio in (128, 512):
            oracle = expect(*odd_case(name, compress_ratio=ratio, seed=1).call_args())
            lost = oracle.written & ~oracle.specified
            assert bool(lost.any()) == (name == "foreign_floats_in_one_output"), name


def test_small_values_reach_the_floor_and_leave_it() -> None:
    exponent = expect(*odd_case("small_values").call_args()).exponent
    assert exponent[0].tolist() == [-20] * 7
    assert int(exponent[3].min()) > -20


def test_random_cases_skip_some_and_write_some() -> None:
    counts = [int(_windows(random_case(seed)).written.sum()) for seed in range(20)]
    assert len(set(counts)) > 2 and max(counts) <= 8
    assert all(int(_windows(random_case(seed, nonsense=0.0)).written.sum()) == 8 for seed in range(5))
