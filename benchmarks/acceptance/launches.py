"""Launches whose every byte is known, the same launch laid out otherwise, and which variant a call takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbuild.aot.measure.variants import chosen
from kvbuild.kernels import oracle, verdict
from kvbuild.kernels.contract import (
    KV_BLOCK_SIZE,
    MIN_PAGE_STRIDE,
    OPERANDS,
    SCALE_DIM,
    SCALE_OFFSET,
    STATE_WIDTH,
    TOKEN_STRIDE,
)
from kvbuild.kernels.workloads import Inputs, Workload, make

from .record import Refused


@dataclass(frozen=True)
class Launch:
    """A call's operands, and the bytes that it must leave in the whole of kv_storage (uint8 [n])."""

    inputs: Inputs
    wanted: Tensor


def judged(operator: Any, inputs: Inputs) -> Launch:
    """The launch with the bytes that one call gave. Refused where the oracle does not accept them."""
    own = inputs.fresh()
    operator.compress(*own.call_args())
    refuse_wrong(own, inputs)
    return Launch(inputs, own.kv_storage)


def refuse_wrong(after: Inputs, before: Inputs) -> verdict.Verdict:
    """Judges what a call left in `after`; Refused where a byte in or around kv_cache is wrong."""
    found = verdict.judge(after.kv_cache, before.kv_cache, oracle.expect(*before.call_args()))
    outside = verdict.changed_outside(after.kv_storage, before.kv_storage, before.kv_cache)
    if not found.right or outside:
        raise Refused(f"{found}; {outside} bytes around kv_cache changed")
    return found


def repeat(operator: Any, launches: Sequence[Launch], times: int) -> Tensor:
    """Makes the launches in turn on the current stream, `times` calls in all, without ever waiting.

    Returns int64 [], on the device: how many bytes of all results were wrong. Each result is compared in the
    stream's order, before the next call overwrites it.
    """
    owns = [launch.inputs.fresh() for launch in launches]
    wrong = torch.zeros((), dtype=torch.int64, device=launches[0].wanted.device)
    for call in range(times):
        launch, own = launches[call % len(launches)], owns[call % len(launches)]
        own.kv_storage.copy_(launch.inputs.kv_storage)
        operator.compress(*own.call_args())
        wrong += (own.kv_storage != launch.wanted).sum()
    return wrong


def windows(count: int, ratio: int, device: torch.device, seed: int = 0) -> Inputs:
    """`count` outputs of one request, in the aligned layout."""
    return make(Workload(1, count * ratio, ratio), device=device, seed=seed)


def first(inputs: Inputs, count: int) -> Inputs:
    """The same launch with only its first outputs; kv_cache and all else are shared."""
    return inputs.with_(boundary_token_indices=inputs.boundary_token_indices[:count].clone())


def slot_bytes(inputs: Inputs, boundaries: Tensor) -> Tensor:
    """uint8 [n, 584]: the slots of these boundary tokens as kv_cache now holds them."""
    slot = inputs.kv_slot_mapping[boundaries]
    page, place = slot // KV_BLOCK_SIZE, slot % KV_BLOCK_SIZE
    payload = inputs.kv_cache[:, :SCALE_OFFSET].unflatten(1, (KV_BLOCK_SIZE, TOKEN_STRIDE))[page, place]
    scales = inputs.kv_cache[:, SCALE_OFFSET:MIN_PAGE_STRIDE]
    return torch.cat((payload, scales.unflatten(1, (KV_BLOCK_SIZE, SCALE_DIM))[page, place]), dim=1)


def overwrite(target: Inputs, source: Inputs) -> None:
    """Copies another launch of the same shapes into the same buffers."""
    for operand in OPERANDS[:-1]:
        getattr(target, operand.name).copy_(getattr(source, operand.name))
    target.kv_storage.copy_(source.kv_storage)


# Launches equal to an aligned one in every operand's value, which no aligned kernel may take.


def padded_pages(inputs: Inputs, pad: int = 5) -> Inputs:
    """State pages with NaN between them, at a stride that is no multiple of 16 floats."""
    blocks, rows, _ = inputs.state_cache.shape
    flat = torch.full((blocks, rows * STATE_WIDTH + pad), torch.nan, device=inputs.state_cache.device)
    state = flat[:, : rows * STATE_WIDTH].unflatten(1, (rows, STATE_WIDTH))
    state.copy_(inputs.state_cache)
    return inputs.with_(state_cache=state)


def float_weight(inputs: Inputs) -> Inputs:
    """The same weights as float32."""
    return inputs.with_(rms_norm_weight=inputs.rms_norm_weight.float())


def smaller_pages(inputs: Inputs, rows: int = 2) -> Inputs:
    """Each state page as several of `rows` rows."""
    parts = inputs.block_size // rows
    state = inputs.state_cache.reshape(-1, rows, STATE_WIDTH)
    part = torch.arange(parts, dtype=torch.int32, device=state.device)
    table = (inputs.block_table[..., None] * parts + part).flatten(1)
    return inputs.with_(state_cache=state, block_table=table, block_size=rows)


def shifted_cache(inputs: Inputs) -> Inputs:
    """kv_cache at an address and a page stride that are even and no more."""
    pages, columns = inputs.kv_cache.shape
    storage = torch.zeros(pages * (columns + 2) + 2, dtype=torch.uint8, device=inputs.kv_cache.device)
    cache = storage.as_strided((pages, columns), (columns + 2, 1), 2)
    cache.copy_(inputs.kv_cache)
    return inputs.with_(kv_cache=cache, kv_storage=storage)


GENERAL_LAYOUTS = {
    "padded state pages": padded_pages,
    "float32 weights": float_weight,
    "2 rows a page": smaller_pages,
    "a shifted kv_cache": shifted_cache,
}


# Which variant a call takes.


def output_counts(variants: Sequence[Any], ratio: int) -> list[int]:
    """Numbers of outputs on both sides of every border between this ratio's variants."""
    borders = {variant.max_outputs for variant in variants if variant.ratio == ratio and variant.max_outputs}
    return sorted({1, 3} | borders | {border + 1 for border in borders})


def occasions(variants: Sequence[Any], ratio: int) -> dict[str, tuple[bool, int]]:
    """By the name of each variant that some call takes: whether aligned, and with how many outputs."""
    found: dict[str, tuple[bool, int]] = {}
    for aligned in (True, False):
        for count in output_counts(variants, ratio):
            found.setdefault(chosen(variants, ratio, aligned, count).name, (aligned, count))
    return found
