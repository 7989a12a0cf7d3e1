"""The operator's truth: float64 through the norm, then the contract's exact rules.

`expect` predicts the 584 bytes of every output, and keeps what is needed to tell a rounding tie, where two
correct float32 implementations may differ, from a wrong byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .contract import (
    DEFAULT_RMS_NORM_EPS,
    HEAD_DIM,
    NOPE_HEAD_DIM,
    NUM_GROUPS,
    QUANT_GROUP,
    ROPE_HEAD_DIM,
    ROPE_PAIRS,
    SCALE_BIAS,
    SCALE_DIM,
    SLOT_BYTES,
    STATE_WIDTH,
    check_operands,
)
from .numerics import bf16_bytes, group_exponent, quantise, round_to_bf16_from_f64
from .windows import Windows, resolve

TIE_BOUND = 2.0**-20

# What float32 code may hold in between must stay well inside its range, or the bytes are not specified.
_FLOAT32_SAFE = 2.0**127
_MEAN_SQUARE_SAFE = 2.0**-100

_CHUNK_BYTES = {"cpu": 64 << 20}
_CHUNK_BYTES_DEVICE = 1 << 30


@dataclass(frozen=True)
class Expectation:
    """What a launch must leave behind, one row an output, in the order of boundary_token_indices.

    written:    bool [N]; False: nothing of this output may be written.
    specified:  bool [N]; False: written, but its bytes are not specified (a NaN or +inf in a live row, or
                arithmetic that leaves float32's range).
    slot:       int64 [N]; the slot, also of an output that is skipped; -1 where it has none.
    expected:   uint8 [N, 584]; 448 INT8, 64 BF16 and 8 scale bytes (zeros where not specified).
    y:          float64 [N, 512]; the normed vector.
    y_bound:    float64 [N, 512]; what float32 summation may be off by.
    rope:       float64 [N, 64]; the rotated last 64 dims, before rounding.
    rope_bound: float64 [N, 64]; the sum of y_bound over the pair.
    exponent:   int32 [N, 7]; e of each group of 64.
    """

    written: Tensor
    specified: Tensor
    slot: Tensor
    expected: Tensor
    y: Tensor
    y_bound: Tensor
    rope: Tensor
    rope_bound: Tensor
    exponent: Tensor

    @property
    def num_outputs(self) -> int:
        """N, padding included."""
        return int(self.written.shape[0])

    def to(self, device: torch.device | str) -> Expectation:
        """The same on another device."""
        return Expectation(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def expect(state_cache: Tensor, token_to_req: Tensor, positions: Tensor, boundary_token_indices: Tensor,
           block_table: Tensor, rms_norm_weight: Tensor, cos_sin_cache: Tensor, kv_slot_mapping: Tensor,
           kv_cache: Tensor, block_size: int, compress_ratio: int,
           rms_norm_eps: float = DEFAULT_RMS_NORM_EPS) -> Expectation:
    """Predicts a launch with these operands; computes on their device and changes nothing.

    Of `kv_cache` only the shape is used. TypeError, ValueError: as `contract.check_operands`.
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
    result = _blank(windows)
    weight = rms_norm_weight.to(torch.float64)
    for chunk in _chunks(windows.written.nonzero().squeeze(1), compress_ratio * STATE_WIDTH * 8):
        _fill(result, chunk, state_cache, windows, weight, cos_sin_cache, rms_norm_eps)
    return result


def encode(y: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """The 584 bytes, uint8 [n, 584], and e, int32 [n, 7], of float64 `y` [n, 512] and `rope` [n, 64]."""
    z = round_to_bf16_from_f64(y[:, :NOPE_HEAD_DIM]).unflatten(1, (NUM_GROUPS, QUANT_GROUP))
    exponent = group_exponent(z.abs().amax(dim=-1))
    scales = torch.zeros((y.shape[0], SCALE_DIM), dtype=torch.uint8, device=y.device)
    scales[:, :NUM_GROUPS] = (exponent + SCALE_BIAS).to(torch.uint8)
    codes = quantise(z, exponent[..., None]).flatten(1).view(torch.uint8)
    return torch.cat((codes, bf16_bytes(round_to_bf16_from_f64(rope)), scales), dim=1), exponent


def _blank(windows: Windows) -> Expectation:
    n, device = windows.written.shape[0], windows.written.device

    def zeros(width: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros((n, width), dtype=dtype, device=device)

    return Expectation(
        written=windows.written,
        specified=torch.zeros_like(windows.written),
        slot=windows.slot,
        expected=zeros(SLOT_BYTES, torch.uint8),
        y=zeros(HEAD_DIM, torch.float64),
        y_bound=zeros(HEAD_DIM, torch.float64),
        rope=zeros(ROPE_HEAD_DIM, torch.float64),
        rope_bound=zeros(ROPE_HEAD_DIM, torch.float64),
        exponent=zeros(NUM_GROUPS, torch.int32),
    )


def _chunks(chosen: Tensor, bytes_per_output: int) -> Iterator[Tensor]:
    size = max(1, _CHUNK_BYTES.get(chosen.device.type, _CHUNK_BYTES_DEVICE) // bytes_per_output)
    for start in range(0, chosen.shape[0], size):
        yield chosen[start:start + size]


def _fill(result: Expectation, chunk: Tensor, state_cache: Tensor, windows: Windows, weight: Tensor,
          cos_sin_cache: Tensor, eps: float) -> None:
    dead = ~windows.live[chunk][..., None]
    rows = state_cache[windows.block[chunk], windows.row[chunk]].masked_fill(dead, 0.0)
    values = rows[..., :HEAD_DIM].to(torch.float64)
    scores = rows[..., HEAD_DIM:].to(torch.float64).masked_fill(dead, -torch.inf)

    terms = torch.exp(scores - scores.amax(dim=1, keepdim=True))
    total = terms.sum(dim=1)
    c = (terms * values).sum(dim=1) / total
    magnitude = (terms * values.abs()).sum(dim=1)
    square = c.square().sum(dim=1)
    mean = square / HEAD_DIM + eps
    rrms = 1.0 / torch.sqrt(mean)[:, None]
    y = c * rrms * weight
    bound = TIE_BOUND * (y.abs() + weight.abs() * rrms * (magnitude / total))
    rope, rope_bound = _rotate(y[:, NOPE_HEAD_DIM:], bound[:, NOPE_HEAD_DIM:],
                               cos_sin_cache[windows.rope_position[chunk]].to(torch.float64))

    def safe(x: Tensor) -> Tensor:
        # False for NaN too: an unordered comparison is False.
        return (x.abs() < _FLOAT32_SAFE).all(dim=-1)

    # NaN or +inf in a live row needs no test of its own: as inf - inf, 0 * inf or a plain sum it reaches y.
    specified = (safe(magnitude) & safe(y) & safe(rope) & (square < _FLOAT32_SAFE)
                 & (mean >= _MEAN_SQUARE_SAFE))
    # Zeros stand in for what is not specified, so that nothing later meets a NaN.
    keep = specified[:, None]
    y, bound, rope, rope_bound = (torch.where(keep, x, 0.0) for x in (y, bound, rope, rope_bound))

    expected, exponent = encode(y, rope)
    result.specified[chunk] = specified
    result.expected[chunk] = torch.where(keep, expected, 0)
    result.y[chunk], result.y_bound[chunk] = y, bound
    result.rope[chunk], result.rope_bound[chunk] = rope, rope_bound
    result.exponent[chunk] = exponent


def _rotate(y: Tensor, bound: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin[:, :ROPE_PAIRS], cos_sin[:, ROPE_PAIRS:]
    u, v = y[:, 0::2], y[:, 1::2]
    rotated = torch.stack((u * cos - v * sin, v * cos + u * sin), dim=-1).flatten(1)
    pair = bound[:, 0::2] + bound[:, 1::2]
    return rotated, pair.repeat_interleave(2, dim=1)
