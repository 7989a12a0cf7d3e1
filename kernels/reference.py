"""The operator in plain float32 PyTorch, on any device: what the benchmarks time kernels against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .contract import (
    DEFAULT_RMS_NORM_EPS,
    HEAD_DIM,
    KV_BLOCK_SIZE,
    MIN_PAGE_STRIDE,
    NOPE_HEAD_DIM,
    NUM_GROUPS,
    QUANT_GROUP,
    ROPE_PAIRS,
    SCALE_BIAS,
    SCALE_DIM,
    SCALE_OFFSET,
    STATE_WIDTH,
    TOKEN_STRIDE,
    check_operands,
)
from .numerics import bf16_bytes, group_exponent, quantise, round_to_bf16
from .windows import Windows, resolve

GATHER_LIMIT_BYTES = 2 << 30


def compress(state_cache: Tensor, token_to_req: Tensor, positions: Tensor, boundary_token_indices: Tensor,
             block_table: Tensor, rms_norm_weight: Tensor, cos_sin_cache: Tensor, kv_slot_mapping: Tensor,
             kv_cache: Tensor, block_size: int, compress_ratio: int,
             rms_norm_eps: float = DEFAULT_RMS_NORM_EPS) -> Tensor:
    """Writes every output into `kv_cache` in place and returns it; all other bytes keep their value.

    The operands are those of `contract.OPERANDS`; what it does not allow raises TypeError or ValueError
    (see `contract.check_operands`). Indices that make no sense skip an output or mask a row.
    The gathered windows, float32 [num_outputs, C, 1024], are worked off in chunks of at most 2 GiB.
    """
    check_operands(
        dict(state_cache=state_cache, token_to_req=token_to_req, positions=positions,
             boundary_token_indices=boundary_token_indices, block_table=block_table,
             rms_norm_weight=rms_norm_weight, cos_sin_cache=cos_sin_cache, kv_slot_mapping=kv_slot_mapping,
             kv_cache=kv_cache),
        block_size, compress_ratio)
    windows = resolve(token_to_req, positions, boundary_token_indices, block_table, kv_slot_mapping,
                      num_blocks=state_cache.shape[0], block_size=block_size, compress_ratio=compress_ratio,
                      kv_pages=kv_cache.shape[0], max_pos=cos_sin_cache.shape[0])
    chosen = windows.written.nonzero().squeeze(1)
    masked = bool((~windows.live[chosen]).any())
    for chunk in _chunks(chosen, compress_ratio * STATE_WIDTH * 4):
        _write(state_cache, windows, chunk, masked, rms_norm_weight, cos_sin_cache, kv_cache, rms_norm_eps)
    return kv_cache


def compress_plain(state_cache: Tensor, token_to_req: Tensor, positions: Tensor,
                   boundary_token_indices: Tensor, block_table: Tensor, rms_norm_weight: Tensor,
                   cos_sin_cache: Tensor, kv_slot_mapping: Tensor, kv_cache: Tensor, block_size: int,
                   compress_ratio: int, rms_norm_eps: float = DEFAULT_RMS_NORM_EPS) -> Tensor:
    """As `compress`, for a launch whose every output is written and whose every row is there.

    It takes that for granted and never asks the device, so that a graph can capture it and torch.compile take
    it whole. Anything else is not checked and gives garbage.
    """
    windows = resolve(token_to_req, positions, boundary_token_indices, block_table, kv_slot_mapping,
                      num_blocks=state_cache.shape[0], block_size=block_size, compress_ratio=compress_ratio,
                      kv_pages=kv_cache.shape[0], max_pos=cos_sin_cache.shape[0])
    every = torch.arange(boundary_token_indices.shape[0], device=kv_cache.device)
    _write(state_cache, windows, every, False, rms_norm_weight, cos_sin_cache, kv_cache, rms_norm_eps)
    return kv_cache


def _write(state_cache: Tensor, windows: Windows, chunk: Tensor, masked: bool, rms_norm_weight: Tensor,
           cos_sin_cache: Tensor, kv_cache: Tensor, rms_norm_eps: float) -> None:
    payloads = kv_cache[:, :SCALE_OFFSET].unflatten(1, (KV_BLOCK_SIZE, TOKEN_STRIDE))
    scale_rows = kv_cache[:, SCALE_OFFSET:MIN_PAGE_STRIDE].unflatten(1, (KV_BLOCK_SIZE, SCALE_DIM))
    c = _pool(state_cache, windows, chunk, masked)
    rrms = 1.0 / torch.sqrt(c.square().mean(dim=-1, keepdim=True) + rms_norm_eps)
    y = (c * rrms) * rms_norm_weight.to(torch.float32)
    codes, scales = _quantise_nope(y[:, :NOPE_HEAD_DIM])
    rotated = _rotate(y[:, NOPE_HEAD_DIM:], cos_sin_cache[windows.rope_position[chunk]])
    page, offset = windows.slot[chunk] // KV_BLOCK_SIZE, windows.slot[chunk] % KV_BLOCK_SIZE
    payloads[page, offset] = torch.cat((codes, bf16_bytes(round_to_bf16(rotated))), dim=1)
    scale_rows[page, offset] = scales


def c128_256_512_compress(state_cache: Tensor, token_to_req: Tensor, positions: Tensor,
                          boundary_token_indices: Tensor, block_table: Tensor, rms_norm_weight: Tensor,
                          cos_sin_cache: Tensor, kv_slot_mapping: Tensor, kv_cache: Tensor,
                          block_size: int, compress_ratio: int,
                          rms_norm_eps: float = DEFAULT_RMS_NORM_EPS) -> Tensor:
    """As `compress`, but into a new, zeroed, contiguous tensor of kv_cache's shape; kv_cache is not read."""
    result = torch.zeros(kv_cache.shape, dtype=torch.uint8, device=kv_cache.device)
    return compress(state_cache, token_to_req, positions, boundary_token_indices, block_table,
                    rms_norm_weight, cos_sin_cache, kv_slot_mapping, result, block_size, compress_ratio,
                    rms_norm_eps)


def _chunks(chosen: Tensor, bytes_per_output: int) -> Iterator[Tensor]:
    size = max(1, GATHER_LIMIT_BYTES // bytes_per_output)
    for start in range(0, chosen.shape[0], size):
        yield chosen[start:start + size]


def _pool(state_cache: Tensor, windows: Windows, chunk: Tensor, masked: bool) -> Tensor:
    rows = state_cache[windows.block[chunk], windows.row[chunk]]
    values, scores = rows[..., :HEAD_DIM], rows[..., HEAD_DIM:]
    if masked:
        dead = ~windows.live[chunk][..., None]
        # The value too: a masked row may hold NaN, and 0 * NaN is NaN.
        values = values.masked_fill(dead, 0.0)
        scores = scores.masked_fill(dead, -torch.inf)
    return (torch.softmax(scores, dim=1) * values).sum(dim=1)


def _quantise_nope(y: Tensor) -> tuple[Tensor, Tensor]:
    groups = round_to_bf16(y).unflatten(1, (NUM_GROUPS, QUANT_GROUP))
    exponent = group_exponent(groups.abs().amax(dim=-1))
    codes = quantise(groups, exponent[..., None]).flatten(1).view(torch.uint8)
    scales = torch.zeros((y.shape[0], SCALE_DIM), dtype=torch.uint8, device=y.device)
    scales[:, :NUM_GROUPS] = (exponent + SCALE_BIAS).to(torch.uint8)
    return codes, scales


def _rotate(y: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin[:, :ROPE_PAIRS], cos_sin[:, ROPE_PAIRS:]
    u, v = y[:, 0::2], y[:, 1::2]
    return torch.stack((u * cos - v * sin, v * cos + u * sin), dim=-1).flatten(1)
