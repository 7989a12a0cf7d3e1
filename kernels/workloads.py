"""The benchmark's workloads and decode steps, as operands made from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .contract import (
    COMPRESS_RATIOS,
    DEFAULT_RMS_NORM_EPS,
    HEAD_DIM,
    KV_BLOCK_SIZE,
    OPERANDS,
    ROPE_HEAD_DIM,
    ROPE_PAIRS,
    SPECIALISED_BLOCK_SIZE,
    STATE_WIDTH,
)

DEFAULT_KV_PAGE_STRIDE = 37440
ROPE_BASE = 10_000.0
PREFILL_SHAPES = ((1, 8192), (4, 32768), (8, 65536), (8, 131072))
DECODE_OUTPUTS = (0, 1, 3, 8, 32)
DECODE_LAUNCH = 40

_SPARE_BLOCKS = 2
_SPARE_SLOTS = 5
_KV_GUARD_BYTES = 256
_LARGE_STATE_ELEMENTS = 1 << 24
_MAX_DECODE_WINDOWS = 16


@dataclass(frozen=True)
class Workload:
    """One launch of the operator.

    A prefill (decode_outputs None): every request has total_tokens / num_reqs tokens, all in the launch,
    with an output at each (position + 1) % compress_ratio == 0. A decode step: one token a request,
    `decode_outputs` of them at a boundary; each request has a history of 1 to 16 windows.
    `padding` negative entries follow the outputs, as in launches of a fixed size.
    """

    num_reqs: int
    total_tokens: int
    compress_ratio: int
    decode_outputs: int | None = None
    padding: int = 0

    @classmethod
    def decode(cls, outputs: int, compress_ratio: int, padding: int | None = None) -> Workload:
        """A decode step in which `outputs` requests, and one more that is not at a boundary, take part."""
        if padding is None:
            padding = max(0, DECODE_LAUNCH - outputs)
        return cls(outputs + 1, outputs + 1, compress_ratio, outputs, padding)

    @property
    def num_outputs(self) -> int:
        """Outputs written; padding apart."""
        if self.decode_outputs is not None:
            return self.decode_outputs
        return self.num_reqs * (self.total_tokens // self.num_reqs // self.compress_ratio)

    @property
    def window_bytes(self) -> int:
        """The least traffic: what the state rows of all windows take."""
        return self.num_outputs * self.compress_ratio * STATE_WIDTH * 4

    @property
    def name(self) -> str:
        if self.decode_outputs is not None:
            return f"decode-{self.decode_outputs}-c{self.compress_ratio}"
        return f"prefill-{self.num_reqs}x{self.total_tokens // self.num_reqs}-c{self.compress_ratio}"


WORKLOADS: tuple[Workload, ...] = tuple(
    Workload(num_reqs, total_tokens, ratio)
    for num_reqs, total_tokens in PREFILL_SHAPES for ratio in COMPRESS_RATIOS)
DECODE_WORKLOADS: tuple[Workload, ...] = tuple(
    Workload.decode(outputs, ratio) for ratio in COMPRESS_RATIOS for outputs in DECODE_OUTPUTS)


@dataclass(frozen=True)
class Inputs:
    """The operands of one launch; shapes and dtypes as in `contract.OPERANDS`.

    kv_storage: uint8 [n], the memory that kv_cache is a view of, with guard bytes around it.
    """

    state_cache: Tensor
    token_to_req: Tensor
    positions: Tensor
    boundary_token_indices: Tensor
    block_table: Tensor
    rms_norm_weight: Tensor
    cos_sin_cache: Tensor
    kv_slot_mapping: Tensor
    kv_cache: Tensor
    kv_storage: Tensor
    block_size: int
    compress_ratio: int
    rms_norm_eps: float = DEFAULT_RMS_NORM_EPS

    def call_args(self) -> tuple[Any, ...]:
        """The twelve arguments of the operator, in the contract's order."""
        return (*(getattr(self, operand.name) for operand in OPERANDS),
                self.block_size, self.compress_ratio, self.rms_norm_eps)

    def fresh(self) -> Inputs:
        """The same operands with a kv_cache (and storage) of their own, laid out alike and equal in bytes."""
        storage = self.kv_storage.clone()
        view = storage.as_strided(tuple(self.kv_cache.shape), self.kv_cache.stride(),
                                  self.kv_cache.storage_offset())
        return replace(self, kv_cache=view, kv_storage=storage)

    def with_(self, **changes: Any) -> Inputs:
        """A copy with some fields replaced; kv_cache is shared unless replaced."""
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> Inputs:
        """The same operands on `device`, with their strides and their offset from an aligned base address."""
        if torch.device(device) == self.kv_cache.device:
            return self
        moved = {operand.name: _moved(getattr(self, operand.name), device) for operand in OPERANDS}
        storage = self.kv_storage.to(device)
        moved["kv_cache"] = storage.as_strided(tuple(self.kv_cache.shape), self.kv_cache.stride(),
                                               self.kv_cache.storage_offset())
        return replace(self, kv_storage=storage, **moved)


def make(workload: Workload, *, device: torch.device | str = "cpu", seed: int = 0,
         shuffle_blocks: bool = True, page_pad: int = 0, row_pad: int = 0,
         kv_page_stride: int = DEFAULT_KV_PAGE_STRIDE,
         kv_columns: int | None = None, kv_pages: int | None = None,
         block_size: int = SPECIALISED_BLOCK_SIZE, padding: int | None = None,
         weight_dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Random normal operands for `workload`, the same for the same arguments.

    page_pad, row_pad: floats between state pages, between rows. kv_page_stride: bytes from page to page;
    kv_columns: kv_cache.shape[1], by default the whole stride. kv_pages: by default what the outputs need
    and a few slots more. padding: negative entries after the outputs, by default the workload's.
    Float values of large inputs are drawn on `device`, so they depend on its kind; all others do not.

    Traps are built in: pads and spare state pages hold NaN, kv_cache holds random bytes, tokens without an
    output carry no slot.
    """
    cpu = torch.Generator().manual_seed(seed)
    ratio = workload.compress_ratio
    requests, positions, boundaries = _tokens(workload, cpu)
    num_outputs = boundaries.shape[0]

    table, num_blocks = _block_table(workload, requests, positions, block_size, shuffle_blocks, cpu)
    if kv_pages is None:
        kv_pages = -(-(num_outputs + _SPARE_SLOTS) // KV_BLOCK_SIZE)
    slots = torch.full((positions.shape[0],), -1, dtype=torch.int64)
    slots[boundaries] = torch.randperm(kv_pages * KV_BLOCK_SIZE, generator=cpu)[:num_outputs]
    if padding is None:
        padding = workload.padding
    boundaries = torch.cat((boundaries, torch.full((padding,), -1, dtype=torch.int64)))
    weight = (1.0 + 0.1 * torch.randn(HEAD_DIM, generator=cpu)).to(weight_dtype)
    max_pos = int(positions.max()) // ratio * ratio + 1 if positions.numel() else 1

    storage = torch.randint(0, 256, (kv_pages * kv_page_stride + 2 * _KV_GUARD_BYTES,), dtype=torch.uint8,
                            generator=cpu).to(device)
    kv_cache = storage.as_strided((kv_pages, kv_columns or kv_page_stride), (kv_page_stride, 1),
                                  _KV_GUARD_BYTES)
    return Inputs(
        state_cache=_state(num_blocks, block_size, page_pad, row_pad, torch.device(device), seed, cpu),
        token_to_req=requests.to(torch.int32).to(device),
        positions=positions.to(device),
        boundary_token_indices=boundaries.to(device),
        block_table=table.to(device),
        rms_norm_weight=weight.to(device),
        cos_sin_cache=cos_sin(max_pos).to(device),
        kv_slot_mapping=slots.to(device),
        kv_cache=kv_cache,
        kv_storage=storage,
        block_size=block_size,
        compress_ratio=ratio,
    )


def _moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return whole.as_strided(tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


def cos_sin(max_pos: int) -> Tensor:
    """float32 [max_pos, 64]: 32 cosines, then 32 sines, of position * 10000^(-2i/64)."""
    frequency = ROPE_BASE ** (-2.0 * torch.arange(ROPE_PAIRS, dtype=torch.float64) / ROPE_HEAD_DIM)
    angle = torch.arange(max_pos, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=1).to(torch.float32)


def _tokens(workload: Workload, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    ratio = workload.compress_ratio
    if workload.decode_outputs is None:
        each = workload.total_tokens // workload.num_reqs
        requests = torch.arange(workload.num_reqs).repeat_interleave(each)
        positions = torch.arange(each).repeat(workload.num_reqs)
        return requests, positions, ((positions + 1) % ratio == 0).nonzero().squeeze(1)
    windows = torch.randint(1, _MAX_DECODE_WINDOWS + 1, (workload.num_reqs,), generator=generator)
    positions = windows * ratio - 1
    positions[workload.decode_outputs:] -= 1
    requests = torch.randperm(workload.num_reqs, generator=generator)
    return requests, positions, torch.arange(workload.decode_outputs)


def _block_table(workload: Workload, requests: Tensor, positions: Tensor, block_size: int, shuffle: bool,
                 generator: torch.Generator) -> tuple[Tensor, int]:
    length = torch.zeros(workload.num_reqs, dtype=torch.int64)
    length.scatter_reduce_(0, requests, positions + 1, "amax")
    columns = -(-length // block_size)
    first = torch.zeros_like(length)
    if workload.decode_outputs is not None:
        # History before the last window is no longer held: its columns name a spare block.
        first = (length - workload.compress_ratio).clamp(min=0) // block_size
    column = torch.arange(int(columns.max()))
    held = (column >= first[:, None]) & (column < columns[:, None])
    needed = int(held.sum())
    num_blocks = needed + _SPARE_BLOCKS
    blocks = torch.arange(needed)
    if shuffle:
        blocks = torch.randperm(needed, generator=generator)
    table = torch.full(held.shape, needed, dtype=torch.int32)
    table[held] = blocks.to(torch.int32)
    return table, num_blocks


def _state(num_blocks: int, block_size: int, page_pad: int, row_pad: int, device: torch.device, seed: int,
           cpu: torch.Generator) -> Tensor:
    row_stride = STATE_WIDTH + row_pad
    page_stride = block_size * row_stride + page_pad
    elements = num_blocks * page_stride
    if elements > _LARGE_STATE_ELEMENTS and device.type != "cpu":
        generator = torch.Generator(device=device).manual_seed(seed)
        flat = torch.randn(elements, device=device, generator=generator)
    else:
        flat = torch.randn(elements, generator=cpu).to(device)
    pages = flat.view(num_blocks, page_stride)
    pages[:, block_size * row_stride:] = torch.nan
    rows = pages[:, :block_size * row_stride].unflatten(1, (block_size, row_stride))
    rows[..., STATE_WIDTH:] = torch.nan
    state = rows[..., :STATE_WIDTH]
    state[num_blocks - _SPARE_BLOCKS:] = torch.nan
    return state
