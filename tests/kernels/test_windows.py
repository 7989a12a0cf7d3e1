"""The index rules, against the same rules written row by row."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbuild.kernels.odd_cases import ODD_CASES, odd_case, random_case
from kvbuild.kernels.windows import Windows, resolve
from kvbuild.kernels.workloads import Inputs


def _resolve(inputs: Inputs) -> Windows:
    return resolve(inputs.token_to_req, inputs.positions, inputs.boundary_token_indices, inputs.block_table,
                   inputs.kv_slot_mapping, num_blocks=inputs.state_cache.shape[0],
                   block_size=inputs.block_size, compress_ratio=inputs.compress_ratio,
                   kv_pages=inputs.kv_cache.shape[0], max_pos=inputs.cos_sin_cache.shape[0])


def row_by_row(inputs: Inputs, output: int) -> tuple[int, int, list[tuple[int, int] | None]] | None:
    """(slot, RoPE position, window rows; None where masked) of one output, or None where it is skipped."""
    ratio = inputs.compress_ratio
    token = int(inputs.boundary_token_indices[output])
    if not 0 <= token < inputs.token_to_req.shape[0]:
        return None
    request, p = int(inputs.token_to_req[token]), int(inputs.positions[token])
    slot, rope = int(inputs.kv_slot_mapping[token]), p // ratio * ratio
    if not (0 <= request < inputs.block_table.shape[0] and 0 <= slot < inputs.kv_cache.shape[0] * 64
            and 0 <= rope < inputs.cos_sin_cache.shape[0]):
        return None
    rows: list[tuple[int, int] | None] = []
    for t in range(p - ratio + 1, p + 1):
        column = t // inputs.block_size
        block = int(inputs.block_table[request, column]) if 0 <= column < inputs.block_table.shape[1] else -1
        rows.append((block, t % inputs.block_size) if t >= 0 and 0 <= block < inputs.state_cache.shape[0]
                    else None)
    return (slot, rope, rows) if any(row is not None for row in rows) else None


def _agree(inputs: Inputs) -> None:
    windows = _resolve(inputs)
    for output in range(inputs.boundary_token_indices.shape[0]):
        wanted = row_by_row(inputs, output)
        assert bool(windows.written[output]) == (wanted is not None), output
        if wanted is None:
            continue
        slot, rope, rows = wanted
        assert (int(windows.slot[output]), int(windows.rope_position[output])) == (slot, rope)
        assert windows.live[output].tolist() == [row is not None for row in rows]
        found = list(zip(windows.block[output].tolist(), windows.row[output].tolist(), strict=True))
        assert found == [row or (0, 0) for row in rows]


def test_odd_cases_resolve_as_the_contract_says() -> None:
    for name in ODD_CASES:
        _agree(odd_case(name))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), block_size=st.integers(1, 20), num_reqs=st.integers(1, 3),
       nonsense=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_random_tables_resolve_as_the_contract_says(seed: int, block_size: int, num_reqs: int,
                                                    nonsense: float) -> None:
    _agree(random_case(seed, block_size=block_size, num_reqs=num_reqs, num_blocks=5, num_tokens=5,
                       nonsense=nonsense))


def test_an_index_that_is_not_written_never_leaves_its_operand() -> None:
    for name in ("nonsense_indices", "no_requests", "no_outputs"):
        inputs = odd_case(name)
        windows = _resolve(inputs)
        assert bool(((windows.block >= 0) & (windows.block < inputs.state_cache.shape[0])).all())
        assert bool(((windows.row >= 0) & (windows.row < inputs.block_size)).all())
        assert bool((windows.rope_position >= 0).all())


def test_operands_without_rows_skip_every_output() -> None:
    inputs = odd_case("mixed_padding")
    for emptied in (
        {"block_table": inputs.block_table[:, :0]},
        {"state_cache": inputs.state_cache[:0]},
        {"cos_sin_cache": inputs.cos_sin_cache[:0]},
        {"kv_cache": inputs.kv_cache[:0]},
        {name: getattr(inputs, name)[:0] for name in ("token_to_req", "positions", "kv_slot_mapping")},
    ):
        assert not bool(_resolve(inputs.with_(**emptied)).written.any()), emptied.keys()


def test_positions_at_the_ends_of_int64_do_not_wrap() -> None:
    inputs = odd_case("mixed_padding")
    for position in (-(1 << 63), (1 << 63) - 1):
        windows = _resolve(inputs.with_(positions=torch.full_like(inputs.positions, position)))
        assert not bool(windows.written.any())
