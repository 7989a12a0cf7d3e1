"""Runs the plain Triton kernels under Triton's interpreter: a script, so that no other process is affected.

A request: the kernels as (name, programs, constants), the operands by field, and the name of a function of
odd_cases whose state cache is used (one too large to send), or None. An answer: ("done", kv_cache, scratch)
or ("error", text). Both are torch.save's bytes after their length, a little-endian int64.

Every address that a kernel reads or writes is compared with the operands: one outside of them is an error.
"""

from __future__ import annotations

import functools
import io
import os
import struct
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from kvbuild.kernels import odd_cases
from kvbuild.kernels.gpgpu import compress
from kvbuild.kernels.gpgpu.route import ARGS


def spans(tensor: torch.Tensor) -> np.ndarray:
    """[2, n]: where the tensor's runs of bytes begin, and one behind where they end."""
    if tensor.numel() == 0:
        return np.zeros((2, 0), np.int64)
    starts, run = np.zeros(1, np.int64), 1
    for extent, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if extent == 1 or stride == 0:
            continue
        if stride != run:
            starts = (starts[:, None] + np.arange(extent) * stride).ravel()
        else:
            run *= extent
    first = tensor.data_ptr() + starts * tensor.element_size()
    return np.stack((first, first + run * tensor.element_size()))


class Guard:
    """The interpreter's own extension module, with loads and stores that stay inside the operands."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.begin = self.end = np.zeros(0, np.uint64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def allow(self, tensors: list[torch.Tensor]) -> None:
        found = np.concatenate([spans(tensor) for tensor in tensors], axis=1).astype(np.uint64)
        self.begin, self.end = found[:, np.argsort(found[0], kind="stable")]

    def check(self, pointers: np.ndarray, mask: np.ndarray, size: int, what: str) -> None:
        used = pointers[mask]
        owner = np.searchsorted(self.begin, used, side="right").astype(np.int64) - 1
        inside = (owner >= 0) & (used + np.uint64(size) <= self.end[np.maximum(owner, 0)])
        if not inside.all():
            count = int((~inside).sum())
            raise IndexError(f"a {what} has {count} of {used.size} addresses outside the operands")

    def load(self, pointers: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        # The interpreter keeps a splatted comparison as integers, which its own loads refuse.
        mask = mask != 0
        self.check(pointers, mask, np.dtype(dtype).itemsize, "load")
        return self.native.load(pointers, mask, other, dtype)

    def store(self, pointers: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
        mask = mask != 0
        self.check(pointers, mask, value.dtype.itemsize, "store")
        self.native.store(pointers, value, mask)


def typed(value: Any, kind: str) -> tl.tensor:
    """A kernel argument of exactly the type that route.ARGS declares, whatever its value."""
    if kind.startswith("*"):
        dtype = tl.pointer_type(tl.str_to_ty(kind[1:], None))
        data = np.array([value.data_ptr()], np.uint64)
    else:
        dtype = tl.str_to_ty(kind, None)
        data = np.array([value], {"i64": np.int64, "i32": np.int32, "fp32": np.float32}[kind])
    return tl.tensor(interpreter.TensorHandle(data, dtype), dtype)


def answer(request: Any, guard: Guard) -> tuple[Any, ...]:
    kernels, operands, maker = request
    if maker is not None:
        operands["state_cache"] = getattr(odd_cases, maker)().state_cache
    try:
        run(kernels, operands, guard)
    except Exception as error:
        return ("error", f"{type(error).__name__}: {error}")
    return ("done", operands["kv_cache"], operands["scratch"])


def run(kernels: list[tuple[str, int, dict[str, int]]], operands: Mapping[str, Any], guard: Guard) -> None:
    guard.allow([value for value in operands.values() if isinstance(value, torch.Tensor)])
    arguments = [typed(operands[arg.field], arg.type) for arg in ARGS]
    for name, programs, constants in kernels:
        if programs:
            getattr(compress, name)[(programs,)](*arguments, **constants)


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    guard = Guard(interpreter._interpreter)
    interpreter._interpreter = guard
    # The language is patched for each call of a device function: half of all time, and needed once.
    interpreter._LangPatchScope.restore = lambda self: None
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    while head := requests.read(8):
        request = torch.load(io.BytesIO(requests.read(struct.unpack("<q", head)[0])), weights_only=False)
        out = io.BytesIO()
        torch.save(answer(request, guard), out)
        answers.write(struct.pack("<q", out.tell()) + out.getvalue())
        answers.flush()


if __name__ == "__main__":
    # What the interpreter prints must not reach the answers.
    with os.fdopen(os.dup(1), "wb") as pipe:
        os.dup2(2, 1)
        main(sys.stdin.buffer, pipe)
