"""Launches that have caught real kernels out, and random ones, to run beside the workloads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .contract import HEAD_DIM, KV_BLOCK_SIZE, STATE_WIDTH
from .workloads import Inputs, Workload, cos_sin, make

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
_FAR_ROW = 2_097_152


def _base(ratio: int, seed: int, *, num_reqs: int = 2, windows: int = 2, **options: object) -> Inputs:
    return make(Workload(num_reqs, num_reqs * windows * ratio, ratio), seed=seed, **options)  # type: ignore[arg-type]


def _rows(inputs: Inputs, output: int, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Page and row of `count` rows of an output's window, from its `first` on."""
    token = inputs.boundary_token_indices[output]
    start = inputs.positions[token] - inputs.compress_ratio + 1 + first
    t = start + torch.arange(count)
    table = inputs.block_table[inputs.token_to_req[token].long()]
    return table[t // inputs.block_size].long(), t % inputs.block_size


def _shared_blocks(ratio: int, seed: int) -> Inputs:
    inputs = _base(ratio, seed)
    table = inputs.block_table.clone()
    table[1] = table[0].flip(0)
    return inputs.with_(block_table=table)


def _strided_table(ratio: int, seed: int) -> Inputs:
    inputs = _base(ratio, seed)
    rows, columns = inputs.block_table.shape
    wide = torch.full((rows, columns + 3), -1, dtype=torch.int32)
    wide[:, :columns] = inputs.block_table
    padded = torch.full((inputs.cos_sin_cache.shape[0], 67), torch.nan)
    padded[:, :64] = inputs.cos_sin_cache
    return inputs.with_(block_table=wide[:, :columns], cos_sin_cache=padded[:, :64])


def _unaligned_base(ratio: int, seed: int) -> Inputs:
    inputs = _base(ratio, seed)
    state = torch.empty(inputs.state_cache.numel() + 1)[1:].view(inputs.state_cache.shape)
    state.copy_(inputs.state_cache)
    storage = inputs.kv_storage
    kv_cache = storage.as_strided((inputs.kv_cache.shape[0], 37376), (37378, 1), 2)
    return inputs.with_(state_cache=state, kv_cache=kv_cache)


def _starts_before_zero(ratio: int, seed: int) -> Inputs:
    inputs = _base(ratio, seed)
    positions = inputs.positions.clone()
    for output, position in enumerate((0, 5, ratio - 2, ratio)):
        positions[inputs.boundary_token_indices[output]] = position
    return inputs.with_(positions=positions)


def _nan_in_masked_rows(ratio: int, seed: int) -> Inputs:
    """A request with 6 rows of history; every other row is NaN, also what a clamped index would meet."""
    inputs = _base(ratio, seed, num_reqs=1, windows=1)
    positions, table, state = inputs.positions.clone(), inputs.block_table.clone(), inputs.state_cache.clone()
    positions[inputs.boundary_token_indices[0]] = 5
    table[0, 0], table[0, 1:] = 3, -1
    state[:] = torch.nan
    state[3, :6] = inputs.state_cache[3, :6]
    return inputs.with_(positions=positions, block_table=table, state_cache=state)


def _masked_blocks(ratio: int, seed: int) -> Inputs:
    """Block ids outside the state cache inside otherwise live windows; block 0 holds NaN."""
    inputs = _base(ratio, seed)
    table, state = inputs.block_table.clone(), inputs.state_cache.clone()
    table[table == 0] = -1
    state[0] = torch.nan
    bad = torch.tensor([-1, state.shape[0], (1 << 31) - 1, -(1 << 31)], dtype=torch.int32)
    table[:, 1::3] = bad.repeat(table.shape[1])[:table[:, 1::3].shape[1]]
    return inputs.with_(block_table=table, state_cache=state)


def _nonsense_indices(ratio: int, seed: int) -> Inputs:
    """Every index the contract names, out of range on both sides, among outputs that are right."""
    inputs = _base(ratio, seed, num_reqs=8)
    token = inputs.boundary_token_indices
    requests, positions = inputs.token_to_req.clone(), inputs.positions.clone()
    slots, table = inputs.kv_slot_mapping.clone(), inputs.block_table.clone()
    end = inputs.kv_cache.shape[0] * KV_BLOCK_SIZE
    for output, request in ((0, -1), (1, 8), (2, (1 << 31) - 1)):
        requests[token[output]] = request
    for output, slot in ((3, end), (4, _INT64_MAX), (5, _INT64_MIN), (6, -1)):
        slots[token[output]] = slot
    # 9: past the columns, although the cosine cache still has a row for it; 10: the cache does not.
    # 14: a window that runs out of the columns half-way.
    last = 4 * ratio
    for output, position in ((7, -1), (8, _INT64_MIN), (9, last - 1), (10, last), (11, _INT64_MAX),
                             (14, 2 * ratio + ratio // 2)):
        positions[token[output]] = position
    table[6, :table.shape[1] // 2] = -7
    boundary = torch.tensor([-1, -2, _INT64_MIN, positions.shape[0], _INT64_MAX])
    return inputs.with_(token_to_req=requests, positions=positions, kv_slot_mapping=slots, block_table=table,
                        cos_sin_cache=cos_sin(last), boundary_token_indices=torch.cat((boundary, token)))


def _minus_inf_scores(ratio: int, seed: int) -> Inputs:
    """-inf in the first rows, in all rows but one, in single dimensions, at either end."""
    inputs = _base(ratio, seed)
    state = inputs.state_cache.clone()
    scores = state[..., HEAD_DIM:]
    scores[_rows(inputs, 0, 0, ratio // 2)] = -torch.inf
    scores[_rows(inputs, 1, 0, ratio - 1)] = -torch.inf
    scores[_rows(inputs, 2, 1, ratio - 1)] = -torch.inf
    page, row = _rows(inputs, 3, 0, ratio - 3)
    scores[page[:, None], row[:, None], torch.arange(0, HEAD_DIM, 7)] = -torch.inf
    return inputs.with_(state_cache=state)


def _huge_scores(ratio: int, seed: int) -> Inputs:
    inputs = _base(ratio, seed)
    state = inputs.state_cache.clone()
    scores = state[..., HEAD_DIM:]
    scores[_rows(inputs, 0, 0, ratio)] *= 1.0e4
    scores[_rows(inputs, 1, 0, ratio)] *= 5.0e37
    scores[_rows(inputs, 2, 0, ratio)] += 3.0e4
    scores[_rows(inputs, 3, 0, ratio)] = -3.0e38
    return inputs.with_(state_cache=state)


def _zero_rows(ratio: int, seed: int) -> Inputs:
    inputs = _base(ratio, seed)
    state = inputs.state_cache.clone()
    state[_rows(inputs, 1, 0, ratio)] = 0.0
    state[..., :64][_rows(inputs, 2, 0, ratio)] = 0.0
    return inputs.with_(state_cache=state)


def _small_values(ratio: int, seed: int) -> Inputs:
    """Groups below, around and above the floor of 1e-4."""
    inputs = _base(ratio, seed)
    state = inputs.state_cache.clone()
    for output, factor in enumerate((1.0e-9, 1.0e-6, 3.0e-6, 1.0e-3)):
        state[..., :HEAD_DIM][_rows(inputs, output, 0, ratio)] *= factor
    return inputs.with_(state_cache=state)


def _cancelling_values(ratio: int, seed: int) -> Inputs:
    """Equal weights and pairs of large values that nearly cancel."""
    inputs = _base(ratio, seed)
    state = inputs.state_cache.clone()
    state[..., HEAD_DIM:] = 1.0
    for output in range(4):
        page, row = _rows(inputs, output, 0, ratio)
        state[page[0::2], row[0::2], :HEAD_DIM] += 1000.0
        state[page[1::2], row[1::2], :HEAD_DIM] -= 1000.0
    return inputs.with_(state_cache=state)


def _foreign_floats_in_one_output(ratio: int, seed: int) -> Inputs:
    """NaN or +inf in a live row: that output's bytes are not specified, its neighbours' are."""
    inputs = _base(ratio, seed, num_reqs=3)
    state = inputs.state_cache.clone()
    for output, dim, value in ((0, 3, torch.nan), (2, HEAD_DIM + 9, torch.nan), (3, 500, torch.inf),
                               (5, HEAD_DIM, torch.inf)):
        page, row = _rows(inputs, output, 17, 1)
        state[page, row, dim] = value
    return inputs.with_(state_cache=state)


def _odd_weight(ratio: int, seed: int) -> Inputs:
    inputs = _base(ratio, seed, weight_dtype=torch.float32)
    weight = inputs.rms_norm_weight.clone()
    weight[::3] *= -50.0
    weight[64:128] = 0.0
    return inputs.with_(rms_norm_weight=weight, rms_norm_eps=1.0e-2)


def _no_outputs(ratio: int, seed: int) -> Inputs:
    return make(Workload.decode(0, ratio, padding=0), seed=seed)


def _no_requests(ratio: int, seed: int) -> Inputs:
    inputs = _base(ratio, seed, num_reqs=1, windows=1)
    return inputs.with_(block_table=inputs.block_table[:0])


def _mixed_padding(ratio: int, seed: int) -> Inputs:
    inputs = _base(ratio, seed)
    pad = torch.full_like(inputs.boundary_token_indices, -1)
    mixed = torch.stack((pad, inputs.boundary_token_indices), dim=1).flatten()
    return inputs.with_(boundary_token_indices=mixed)


ODD_CASES: dict[str, Callable[[int, int], Inputs]] = {
    "block_size_1": lambda ratio, seed: _base(ratio, seed, block_size=1),
    "block_size_3": lambda ratio, seed: _base(ratio, seed, block_size=3, page_pad=5),
    "block_size_16": lambda ratio, seed: _base(ratio, seed, block_size=16),
    "block_size_1000": lambda ratio, seed: _base(ratio, seed, block_size=1000),
    "padded_pages": lambda ratio, seed: _base(ratio, seed, page_pad=16),
    "padded_rows": lambda ratio, seed: _base(ratio, seed, page_pad=3, row_pad=1),
    "strided_kv": lambda ratio, seed: _base(ratio, seed, kv_page_stride=37458, kv_columns=37376),
    "shared_blocks": _shared_blocks,
    "strided_table": _strided_table,
    "unaligned_base": _unaligned_base,
    "starts_before_zero": _starts_before_zero,
    "nan_in_masked_rows": _nan_in_masked_rows,
    "masked_blocks": _masked_blocks,
    "nonsense_indices": _nonsense_indices,
    "minus_inf_scores": _minus_inf_scores,
    "huge_scores": _huge_scores,
    "zero_rows": _zero_rows,
    "small_values": _small_values,
    "cancelling_values": _cancelling_values,
    "foreign_floats_in_one_output": _foreign_floats_in_one_output,
    "odd_weight": _odd_weight,
    "no_outputs": _no_outputs,
    "no_requests": _no_requests,
    "mixed_padding": _mixed_padding,
}


def odd_case(name: str, *, compress_ratio: int = 128, seed: int = 0,
             device: torch.device | str = "cpu") -> Inputs:
    """The operands of one of ODD_CASES; at most 16 windows of state. KeyError: no such case."""
    return ODD_CASES[name](compress_ratio, seed).to(device)


def random_case(seed: int, *, compress_ratio: int = 128, block_size: int = 8, num_reqs: int = 2,
                num_blocks: int = 20, num_tokens: int = 8, page_pad: int = 0, row_pad: int = 0,
                kv_page_stride: int = 37440, kv_columns: int | None = None, nonsense: float = 0.1,
                device: torch.device | str = "cpu") -> Inputs:
    """A launch with random tables, positions and slots, every token at a boundary, in random order.

    `nonsense` is the share of the entries of each index operand that is moved out of its range (or near its
    edges). Blocks are shared between requests and within one. Slots are distinct.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def spoil(index: Tensor, end: int) -> Tensor:
        foreign = torch.tensor([-1, -2, -(1 << 31), end, end + 1, (1 << 31) - 1])
        chosen = torch.rand(index.shape, generator=generator) < nonsense
        return torch.where(chosen, foreign[integers(0, foreign.shape[0], *index.shape)], index)

    history = 3 * compress_ratio
    columns = -(-history // block_size)
    inputs = make(Workload(1, num_blocks * block_size, compress_ratio), seed=seed, block_size=block_size,
                  page_pad=page_pad, row_pad=row_pad, kv_page_stride=kv_page_stride, kv_columns=kv_columns,
                  kv_pages=2)
    slots = torch.randperm(2 * KV_BLOCK_SIZE, generator=generator)[:num_tokens]
    return inputs.with_(
        token_to_req=spoil(integers(0, num_reqs, num_tokens), num_reqs).to(torch.int32),
        positions=spoil(integers(0, history, num_tokens), history),
        boundary_token_indices=spoil(torch.randperm(num_tokens, generator=generator), num_tokens),
        block_table=spoil(integers(0, num_blocks, num_reqs, columns), num_blocks + 2).to(torch.int32),
        kv_slot_mapping=spoil(slots, 2 * KV_BLOCK_SIZE),
        cos_sin_cache=cos_sin(2 * compress_ratio + 1),
    ).to(device)


def far_rows(*, compress_ratio: int = 128, seed: int = 0, device: torch.device | str = "cpu") -> Inputs:
    """Windows beyond row 2,097,152, where a 32-bit product of row and width overflows.

    Takes 8.6 GB of address space; on a CPU only the rows of the windows are ever touched.
    """
    inputs = _base(compress_ratio, seed).to(device)
    num_blocks = inputs.state_cache.shape[0]
    first = _FAR_ROW // inputs.block_size + 1
    state = torch.empty((first + num_blocks, inputs.block_size, STATE_WIDTH), device=device)
    state[first:] = inputs.state_cache
    return inputs.with_(state_cache=state, block_table=inputs.block_table + first)


def relocated(inputs: Inputs, seed: int) -> Inputs:
    """The same launch with its state pages in another order; every output's bytes must stay the same."""
    num_blocks = inputs.state_cache.shape[0]
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    order = order.to(inputs.state_cache.device)
    state = torch.empty_like(inputs.state_cache)
    state[order] = inputs.state_cache
    table = inputs.block_table.long()
    inside = (table >= 0) & (table < num_blocks)
    moved = torch.where(inside, order[torch.where(inside, table, 0)], table)
    return inputs.with_(state_cache=state, block_table=moved.to(torch.int32))
