"""The scan's state, to the bit, against the documented order of summation in plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvbuild.kernels.contract import HEAD_DIM, LEAF_ROWS, WINDOW_PARTS
from kvbuild.kernels.gpgpu import route
from kvbuild.kernels.gpgpu.route import Tile
from kvbuild.kernels.odd_cases import odd_case
from kvbuild.kernels.windows import resolve
from kvbuild.kernels.workloads import Inputs

F32 = np.float32
INFINITY = F32(np.inf)
LOG2E = F32(1.4426950408889634)
# What a row counts for in the running maximum where all its scores are -inf.
LEAST = np.finfo(F32).min

State = tuple[np.ndarray, np.ndarray, np.ndarray]


def weight_of(score: np.ndarray, top: np.ndarray) -> np.ndarray:
    return np.exp2((score - np.where(top == -INFINITY, F32(0), top)) * LOG2E)


def fold(rows: np.ndarray, exists: np.ndarray) -> State:
    """The state of one part: rows [n, 1024], exists [n]."""
    top = np.full(HEAD_DIM, -INFINITY)
    weight, total = np.zeros(HEAD_DIM, F32), np.zeros(HEAD_DIM, F32)
    for first in range(0, len(rows), LEAF_ROWS):
        leaf, there = rows[first : first + LEAF_ROWS], exists[first : first + LEAF_ROWS]
        values = np.where(there[:, None], leaf[:, :HEAD_DIM], F32(0))
        scores = np.where(there[:, None], leaf[:, HEAD_DIM:], -INFINITY)
        raised = np.maximum(top, scores.max(axis=0))
        if there.any():
            raised = np.maximum(raised, LEAST)
        scale, (w0, w1, w2, w3) = weight_of(top, raised), (weight_of(score, raised) for score in scores)
        v0, v1, v2, v3 = values
        weight = weight * scale + ((w0 + w1) + (w2 + w3))
        total = total * scale + ((w0 * v0 + w1 * v1) + (w2 * v2 + w3 * v3))
        top = raised
    return top, weight, total


def merge(a: State, b: State) -> State:
    top = np.maximum(a[0], b[0])
    left, right = weight_of(a[0], top), weight_of(b[0], top)
    return top, a[1] * left + b[1] * right, a[2] * left + b[2] * right


def state(parts: list[State]) -> State:
    """The parts' states merged as a balanced tree of neighbours."""
    half = len(parts) // 2
    return merge(state(parts[:half]), state(parts[half:])) if half else parts[0]


def expected(x: Inputs, runs: int) -> np.ndarray:
    """[outputs, runs, 3, 512]: the states of the runs of each output's window; NaN for what is skipped."""
    windows = resolve(
        x.token_to_req, x.positions, x.boundary_token_indices, x.block_table, x.kv_slot_mapping,
        num_blocks=x.state_cache.shape[0], block_size=x.block_size, compress_ratio=x.compress_ratio,
        kv_pages=x.kv_cache.shape[0], max_pos=x.cos_sin_cache.shape[0],
    )  # fmt: skip
    found = np.full((windows.written.shape[0], runs, 3, HEAD_DIM), np.nan, F32)
    for output in windows.written.nonzero().flatten().tolist():
        rows = x.state_cache[windows.block[output], windows.row[output]].numpy()
        each = x.compress_ratio // WINDOW_PARTS
        live = windows.live[output].numpy()
        parts = [fold(rows[i : i + each], live[i : i + each]) for i in range(0, len(rows), each)]
        share = WINDOW_PARTS // runs
        for run in range(runs):
            found[output, run] = state(parts[run * share : (run + 1) * share])
    return found


CASES = [
    ("padded_pages", 128, Tile(4, 512, 8, 4, 1), "aligned"),
    ("masked_blocks", 128, Tile(4, 256, 1, 4, 1), "aligned"),
    ("masked_blocks", 128, Tile(4, 512, 2, 4, 1), "general"),
    ("starts_before_zero", 128, Tile(4, 256, 2, 4, 1), "general"),
    ("starts_before_zero", 128, Tile(4, 512, 4, 4, 1), "aligned"),
    ("minus_inf_scores", 128, Tile(4, 512, 8, 4, 1), "aligned"),
    ("huge_scores", 128, Tile(4, 512, 4, 4, 1), "general"),
    ("block_size_3", 256, Tile(4, 512, 2, 4, 1), "general"),
]


@pytest.mark.parametrize(
    ("name", "ratio", "tile", "layout"), CASES, ids=lambda value: str(getattr(value, "tag", value))
)
def test_the_order_of_summation(interpreter: Any, name: str, ratio: int, tile: Tile, layout: str) -> None:
    x = odd_case(name, compress_ratio=ratio, seed=2)
    if ratio > 128:
        x = x.with_(boundary_token_indices=x.boundary_token_indices[:1])
    scan, _ = route.kernels_for(ratio, layout, tile)
    with np.errstate(all="ignore"):
        wanted = expected(x, tile.split)
    found = interpreter.launch(x, [scan], torch.full(wanted.shape, torch.nan))
    assert np.array_equal(found.scratch.numpy(), wanted, equal_nan=True)
    assert torch.equal(found.inputs.kv_storage, x.kv_storage), "the scan alone writes scratch alone"
    assert not np.isnan(wanted).all(axis=(1, 2, 3)).any()


def test_skipped_outputs_leave_their_scratch(interpreter: Any) -> None:
    x = odd_case("mixed_padding")
    scan, _ = route.kernels_for(128, "aligned", Tile(4, 256, 1, 4, 1))
    found = interpreter.launch(x, [scan], torch.full((8, 3, HEAD_DIM), torch.nan)).scratch
    assert found[0::2].isnan().all()
    assert not found[1::2].isnan().any()
