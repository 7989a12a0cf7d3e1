"""Binds a launcher to the operands that stay the same, so that a step passes the rest only."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

from .direct import ExchangeAPI, exchange_api

FIXED = ("state_cache", "block_table", "rms_norm_weight", "cos_sin_cache", "kv_cache")
VARYING = ("token_to_req", "positions", "boundary_token_indices", "kv_slot_mapping")


class _Watch(ctypes.Structure):
    """The launcher's kvb_watch."""

    _fields_ = (
        ("look", ctypes.c_void_p), ("owners", ctypes.c_void_p * len(FIXED)), ("failed", ctypes.c_void_p),
        ("pause", ctypes.c_void_p), ("resume", ctypes.c_void_p),
    )  # fmt: skip


def bind(make: Callable[..., Any], fixed: tuple[Any, ...], *scalars: Any) -> Callable[..., None]:
    """A function of the VARYING operands that launches with these fixed ones.

    make:    the launcher's `bind`
    fixed:   the tensors of FIXED, in that order; kept alive as long as the function
    scalars: block_size, compress_ratio, rms_norm_eps

    The function raises ValueError where a fixed tensor has other memory, another shape or other strides than
    when it was bound. Both raise what the launcher raises.
    """
    look = _look(fixed)
    if look is None:
        return _handed_over(make(*fixed, *scalars), fixed)
    python = ctypes.pythonapi
    watch = _Watch(
        look, tuple(map(id, fixed)), *map(_address, (python.PyErr_Clear, python.PyEval_SaveThread,
                                                     python.PyEval_RestoreThread)),
    )  # fmt: skip
    step = make(*fixed, *scalars, ctypes.c_void_p(ctypes.addressof(watch)))
    # The launcher looks at the tensors first, and gives the interpreter's lock away after that.
    step.release_gil = False
    step.owners = fixed
    return step


def _handed_over(step: Callable[..., None], fixed: tuple[Any, ...]) -> Callable[..., None]:
    """For tensors that C cannot look at by itself: they are passed on every step, and compared there."""

    def pass_all(
        token_to_req: Any, positions: Any, boundary_token_indices: Any, kv_slot_mapping: Any
    ) -> None:
        step(token_to_req, positions, boundary_token_indices, kv_slot_mapping, *fixed)

    return pass_all


def _look(tensors: tuple[Any, ...]) -> int | None:
    """The address of torch's function that describes a tensor without taking hold of it, where all of these
    are torch's and this torch has one."""
    torch = sys.modules.get("torch")
    if torch is None or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return None
    api = exchange_api()
    look: int | None = ExchangeAPI.from_address(api).tensor_from_object if api is not None else None
    return look


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value
