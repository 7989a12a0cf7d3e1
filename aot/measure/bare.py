"""The driver's own launch of the kernels that a call launches: the floor of what any call can cost the host.

No checks, no choice, no packing: the parameters are made once, and cuLaunchKernel (cuLaunchKernelEx for a
cluster) is all that a launch calls. ctypes makes the calls; an empty one like them says what it takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...kernels.workloads import Inputs
from ...runtime.launchtable import Kernel, Variant

_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14
_DEFAULT_SHARED, _PORTABLE_CLUSTER = 48 * 1024, 8
_CLUSTER_DIMENSION, _CLUSTER_SCHEDULING, _SPREAD = 4, 5, 1
_TYPES = {"i64": ctypes.c_int64, "i32": ctypes.c_int32, "fp32": ctypes.c_float}


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


class BareLaunch:
    """The launches of one variant for one set of operands, in the current context.

    launch: makes them; empty: calls a function that does nothing as many times with the same arguments. What
    a launch costs the host is the difference of the two.
    """

    def __init__(
        self,
        read: Callable[[str], bytes],
        kernels: tuple[Kernel, ...],
        variant: Variant,
        inputs: Inputs,
        stream: int,
    ) -> None:
        """read: a kernel's blob by its sha256; kernels: the target's; stream: a CUstream as a number.

        Raises RuntimeError where the driver refuses a kernel.
        """
        device = inputs.kv_cache.device
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._kept: list[Any] = []
        self._values = _fields(inputs)
        outputs = inputs.boundary_token_indices.shape[0]
        scratch = torch.empty(max(outputs * variant.scratch_per_output, 16), dtype=torch.uint8, device=device)
        self._keep(scratch)
        self._values["scratch"] = scratch.data_ptr()
        by_name = {kernel.name: kernel for kernel in kernels}
        nothing = ctypes.CDLL(None).labs
        calls, empties = [], []
        for name in variant.kernels:
            kernel = by_name[name]
            loaded = self._load(read(kernel.blob), kernel, device.index or 0)
            function, arguments = self._prepare(loaded, kernel, outputs, stream)
            calls.append(partial(function, *arguments))
            empties.append(partial(nothing, *arguments))
        self.launch: Callable[[], None] = partial(_all, tuple(calls))
        self.empty: Callable[[], None] = partial(_all, tuple(empties))

    def _keep(self, value: Any) -> Any:
        self._kept.append(value)
        return value

    def _check(self, function: str, *arguments: Any) -> None:
        code = getattr(self._driver, function)(*arguments)
        if code != 0:
            raise RuntimeError(f"{function}: error {code}")

    def _load(self, image: bytes, kernel: Kernel, ordinal: int) -> ctypes.c_void_p:
        library, function = ctypes.c_void_p(), ctypes.c_void_p()
        options = (None, None, 0, None, None, 0)
        self._check("cuLibraryLoadData", ctypes.byref(library), self._keep(image), *options)
        self._check("cuLibraryGetKernel", ctypes.byref(function), library, kernel.entry.encode())
        if kernel.shared > _DEFAULT_SHARED:
            self._check("cuKernelSetAttribute", _DYNAMIC_SHARED, kernel.shared, function, ordinal)
        if kernel.cluster > _PORTABLE_CLUSTER:
            self._check("cuKernelSetAttribute", _NON_PORTABLE_CLUSTER, 1, function, ordinal)
        return function

    def _prepare(
        self, function: ctypes.c_void_p, kernel: Kernel, outputs: int, stream: int
    ) -> tuple[Any, tuple[Any, ...]]:
        """The driver's function and its arguments, ready to be passed again and again."""
        none = ctypes.c_void_p()
        values = [_TYPES.get(arg.type, ctypes.c_void_p)(self._values[arg.field]) for arg in kernel.args]
        values += [ctypes.c_void_p() for _ in range(kernel.hidden)]
        addresses = [ctypes.addressof(value) for value in self._keep(values)]
        parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        grid = (outputs * kernel.grid.per_output * kernel.cluster, kernel.grid.y, 1)
        block = (kernel.num_warps * 32, 1, 1)
        if kernel.cluster == 1:
            numbers = tuple(map(ctypes.c_uint, (*grid, *block, kernel.shared)))
            arguments = (function, *numbers, ctypes.c_void_p(stream), parameters, none)
            return self._driver.cuLaunchKernel, arguments
        attributes = self._keep((_Attribute * 2)())
        attributes[0].id, attributes[1].id = _CLUSTER_DIMENSION, _CLUSTER_SCHEDULING
        attributes[0].value[:3] = (kernel.cluster, 1, 1)
        attributes[1].value[0] = _SPREAD
        config = self._keep(
            _Config(grid, block, kernel.shared, stream, ctypes.addressof(attributes), len(attributes))
        )
        return self._driver.cuLaunchKernelEx, (ctypes.byref(config), function, parameters, none)


def _all(calls: tuple[Callable[[], int], ...]) -> None:
    for call in calls:
        call()


def _fields(inputs: Inputs) -> dict[str, Any]:
    """kvb_operands by field, without scratch."""
    state, table = inputs.state_cache, inputs.block_table
    cos_sin, cache = inputs.cos_sin_cache, inputs.kv_cache

    def stride(tensor: torch.Tensor, dimension: int) -> int:
        return tensor.stride(dimension) if tensor.shape[dimension] > 1 else 0

    tensors = ("state_cache", "token_to_req", "positions", "boundary_token_indices", "block_table",
               "rms_norm_weight", "cos_sin_cache", "kv_slot_mapping", "kv_cache")  # fmt: skip
    return {
        **{name: getattr(inputs, name).data_ptr() for name in tensors},
        "num_blocks": state.shape[0], "state_page_stride": stride(state, 0),
        "state_row_stride": stride(state, 1), "block_size": inputs.block_size,
        "num_tokens": inputs.token_to_req.shape[0], "num_outputs": inputs.boundary_token_indices.shape[0],
        "num_reqs": table.shape[0], "blocks_per_req": table.shape[1], "block_table_stride": stride(table, 0),
        "max_pos": cos_sin.shape[0], "cos_sin_stride": stride(cos_sin, 0),
        "kv_pages": cache.shape[0], "kv_page_stride": stride(cache, 0),
        "weight_is_fp32": int(inputs.rms_norm_weight.dtype == torch.float32),
        "compress_ratio": inputs.compress_ratio, "rms_norm_eps": inputs.rms_norm_eps,
    }  # fmt: skip
