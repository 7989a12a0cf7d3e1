"""The same kernels through Triton's JIT, and the public kernels' shape. Imports triton; imported late."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ...kernels.contract import HEAD_DIM
from ...kernels.gpgpu import route
from ...kernels.gpgpu.route import Tile
from ...kernels.workloads import Inputs
from .whole_window import whole_window_finish, whole_window_scan

# Dimensions and warps of the whole-window form's first kernel that are worth a try.
WHOLE_WINDOW_SHAPES = ((64, 4), (64, 8), (32, 4), (32, 8))
_PACKAGE = "kvbuild.kernels.gpgpu"


def values(inputs: Inputs) -> dict[str, Any]:
    """A call's kernel arguments by field, tensors and numbers, apart from scratch."""
    state, table, cache = inputs.state_cache, inputs.block_table, inputs.kv_cache
    return {
        "state_cache": state,
        "token_to_req": inputs.token_to_req,
        "positions": inputs.positions,
        "boundary_token_indices": inputs.boundary_token_indices,
        "block_table": table,
        "rms_norm_weight": inputs.rms_norm_weight,
        "cos_sin_cache": inputs.cos_sin_cache,
        "kv_slot_mapping": inputs.kv_slot_mapping,
        "kv_cache": cache,
        "num_blocks": state.shape[0],
        "state_page_stride": state.stride(0),
        "state_row_stride": state.stride(1),
        "block_size": inputs.block_size,
        "num_tokens": inputs.token_to_req.shape[0],
        "num_outputs": inputs.boundary_token_indices.shape[0],
        "num_reqs": table.shape[0],
        "blocks_per_req": table.shape[1],
        "block_table_stride": table.stride(0),
        "max_pos": inputs.cos_sin_cache.shape[0],
        "cos_sin_stride": inputs.cos_sin_cache.stride(0),
        "kv_pages": cache.shape[0],
        "kv_page_stride": cache.stride(0),
        "weight_is_fp32": int(inputs.rms_norm_weight.dtype == torch.float32),
        "rms_norm_eps": inputs.rms_norm_eps,
    }


def same_kernels(inputs: Inputs, tile: Tile) -> Callable[[], object]:
    """A call that launches, through Triton's JIT, what an aligned variant with this tile launches."""
    outputs = inputs.boundary_token_indices.shape[0]
    bytes_each = route.scratch_per_output(tile)
    scratch = torch.empty(max(4, outputs * bytes_each) // 4, device=inputs.kv_cache.device)
    arguments = {**values(inputs), "scratch": scratch}
    launches = []
    for form in route.kernels_for(inputs.compress_ratio, "aligned", tile):
        function = _function(form.source, form.function)
        options = {"num_warps": form.num_warps, "num_ctas": form.num_ctas, "enable_fp_fusion": False}
        positional = [arguments[argument.field] for argument in route.ARGS]
        launches.append(
            (function[(outputs * form.per_output, form.y)], positional, {**dict(form.constexprs), **options})
        )

    def call() -> None:
        for launch, positional, keywords in launches:
            launch(*positional, **keywords)

    return call


def whole_window(inputs: Inputs, block_d: int, num_warps: int) -> Callable[[], object]:
    """A call of the two-kernel form with [ratio, block_d] tiles."""
    outputs = inputs.boundary_token_indices.shape[0]
    scratch = torch.empty((max(1, outputs), HEAD_DIM), device=inputs.kv_cache.device)
    arguments = {**values(inputs), "scratch": scratch}
    scan, finish = whole_window_scan, whole_window_finish
    ratio = inputs.compress_ratio
    own = {name: arguments[name] for name in scan.arg_names if name in arguments}
    last = {name: arguments[name] for name in finish.arg_names if name in arguments}
    first_grid, last_grid = scan[(outputs, HEAD_DIM // block_d)], finish[(outputs,)]

    def call() -> None:
        first_grid(**own, RATIO=ratio, BLOCK_D=block_d, num_warps=num_warps, enable_fp_fusion=False)
        last_grid(**last, RATIO=ratio, num_warps=route.FINALIZE_WARPS, enable_fp_fusion=False)

    return call


def _function(source: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{_PACKAGE}.{source.removesuffix('.py')}"), name)
