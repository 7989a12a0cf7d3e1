"""The finish of an output alone, from a state in scratch: norm, quantisation, rotation, bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvbuild.kernels.contract import (
    HEAD_DIM,
    NOPE_HEAD_DIM,
    NUM_GROUPS,
    QUANT_GROUP,
    SCALE_BIAS,
    SCALE_OFFSET,
    TOKEN_STRIDE,
)
from kvbuild.kernels.gpgpu import route
from kvbuild.kernels.gpgpu.route import Tile
from kvbuild.kernels.numerics import bf16_bytes, group_exponent, quantise, round_to_bf16
from kvbuild.kernels.workloads import Inputs, Workload, make

F32 = np.float32
ONE_RUN = Tile(4, 256, 1, 4, 1)


def rrms(c: np.ndarray, eps: float, neighbours: bool = True) -> np.float32:
    """1 / sqrt(mean(c^2) + eps) in float32, the squares added in a tree of neighbours (or halves)."""
    squares = c * c
    while half := squares.size // 2:
        squares = squares[0::2] + squares[1::2] if neighbours else squares[:half] + squares[half:]
    return F32(1) / np.sqrt(squares[0] / F32(HEAD_DIM) + F32(eps))


def slot(
    c: np.ndarray, weight: np.ndarray, cos: np.ndarray, sin: np.ndarray, eps: float, neighbours: bool = True
) -> bytes:
    """The 584 bytes of an output with the un-normalised vector `c`; all float32."""
    y = (c * rrms(c, eps, neighbours)) * weight
    z = round_to_bf16(torch.from_numpy(y[:NOPE_HEAD_DIM])).view(NUM_GROUPS, QUANT_GROUP)
    exponent = group_exponent(z.abs().amax(-1))
    codes = quantise(z, exponent[:, None]).numpy().tobytes()
    u, v = y[NOPE_HEAD_DIM::2], y[NOPE_HEAD_DIM + 1 :: 2]
    turned = np.stack((u * cos - v * sin, v * cos + u * sin), axis=1).ravel()
    rope = bf16_bytes(round_to_bf16(torch.from_numpy(turned))).numpy().tobytes()
    return codes + rope + bytes([*(exponent + SCALE_BIAS).tolist(), 0])


def one_output(seed: int, position: int = 127) -> Inputs:
    x = make(Workload(1, 512, 128), seed=seed, weight_dtype=torch.float32)
    return x.with_(boundary_token_indices=torch.tensor([position]))


def finish(interpreter: Any, x: Inputs, c: np.ndarray, layout: str = "general") -> bytes:
    """The bytes of the one output's slot; no other byte may change."""
    _, finalize = route.kernels_for(128, layout, ONE_RUN)
    state = np.stack((np.zeros_like(c), np.ones_like(c), c))
    found = interpreter.launch(x, [finalize], torch.from_numpy(state.astype(F32))).inputs
    page, place = divmod(int(x.kv_slot_mapping[x.boundary_token_indices[0]]), 64)
    own = np.zeros(x.kv_cache.shape, bool)
    own[page, TOKEN_STRIDE * place :][:TOKEN_STRIDE] = True
    own[page, SCALE_OFFSET + 8 * place :][:8] = True
    after = found.kv_cache.numpy()
    assert np.array_equal(after[~own], x.kv_cache.numpy()[~own])
    return bytes(after[own])


def angles(x: Inputs) -> tuple[np.ndarray, np.ndarray]:
    position = int(x.positions[x.boundary_token_indices[0]]) // 128 * 128
    cos, sin = x.cos_sin_cache[position].numpy().reshape(2, 32)
    return cos, sin


def vector(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(HEAD_DIM).astype(F32)


@pytest.mark.parametrize("position", [127, 383])
def test_every_byte_of_a_slot(interpreter: Any, position: int) -> None:
    x = one_output(3, position)
    c = vector(position) * F32(30)
    assert finish(interpreter, x, c) == slot(c, x.rms_norm_weight.numpy(), *angles(x), x.rms_norm_eps)


def test_bf16_weights_in_both_layouts(interpreter: Any) -> None:
    x = one_output(4, 255)
    x = x.with_(rms_norm_weight=x.rms_norm_weight.to(torch.bfloat16))
    c = vector(4)
    wanted = slot(c, x.rms_norm_weight.to(torch.float32).numpy(), *angles(x), x.rms_norm_eps)
    assert [finish(interpreter, x, c, layout) for layout in route.LAYOUTS] == [wanted] * 2


def test_the_tree_of_squares_to_the_last_bit(interpreter: Any) -> None:
    vectors = [vector(seed) * np.exp(vector(seed + 50)) for seed in range(50)]
    tell = [c for c in vectors if rrms(c, 1e-6) != rrms(c, 1e-6, neighbours=False)]
    for c in tell[:4]:
        # Each y lies at a tie of bf16 or next to it, so that the last bit of the norm shows in the bytes.
        tie = (1 + (2 * np.arange(HEAD_DIM) % 128 + 1) / 256).astype(F32)
        weight = tie / (c * rrms(c, 1e-6))
        x = one_output(9).with_(rms_norm_weight=torch.from_numpy(weight))
        wanted = slot(c, weight, *angles(x), x.rms_norm_eps)
        assert finish(interpreter, x, c) == wanted
        assert slot(c, weight, *angles(x), x.rms_norm_eps, neighbours=False) != wanted
    assert len(tell) >= 4


EDGES = (1e-9, 1e-4, 0.003875732421875, 0.0155029296875, 126.5, 127.0, 127.5, 254.0)


@pytest.mark.parametrize("largest", EDGES)
def test_the_exponent_at_its_edges(interpreter: Any, largest: float) -> None:
    # All of c is 1 and eps 0 but for what rounds away: y is the weight itself.
    x = one_output(5).with_(rms_norm_eps=0.0)
    weight = (vector(5) % 1.0 * F32(largest)).astype(F32)
    weight[np.arange(NUM_GROUPS) * QUANT_GROUP + 9] = largest * np.where(np.arange(NUM_GROUPS) % 2, -1, 1)
    x = x.with_(rms_norm_weight=torch.from_numpy(weight))
    c = np.ones(HEAD_DIM, F32)
    assert finish(interpreter, x, c) == slot(c, weight, *angles(x), 0.0)


def test_a_group_of_zeros_and_the_padding_byte(interpreter: Any) -> None:
    x = one_output(6)
    c = vector(6)
    c[64:128] = 0.0
    found = finish(interpreter, x, c)
    assert found[64:128] == bytes(64)
    assert (found[TOKEN_STRIDE + 1], found[TOKEN_STRIDE + 7]) == (107, 0)
    assert found == slot(c, x.rms_norm_weight.numpy(), *angles(x), x.rms_norm_eps)


def test_codes_are_truncated_towards_zero_on_both_sides(interpreter: Any) -> None:
    x = one_output(7).with_(rms_norm_eps=0.0)
    weight = np.full(HEAD_DIM, 0.75, F32)
    weight[0::2] = -0.75
    weight[np.arange(8) * 64] = 126.5
    found = finish(interpreter, x.with_(rms_norm_weight=torch.from_numpy(weight)), np.ones(HEAD_DIM, F32))
    assert found[:4] == bytes([126, 0, 0, 0])


def test_a_state_without_a_row_writes_nothing(interpreter: Any) -> None:
    x = one_output(8)
    _, finalize = route.kernels_for(128, "general", ONE_RUN)
    state = torch.zeros(3, HEAD_DIM)
    state[0] = -torch.inf
    found = interpreter.launch(x, [finalize], state).inputs
    assert torch.equal(found.kv_storage, x.kv_storage)
