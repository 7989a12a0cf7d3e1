"""Names the argument at fault when a call failed before the launcher could look at it.

Runs after a failure only: a call that succeeds pays nothing for it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .launcher import device_error

OPERANDS = (
    "state_cache",
    "token_to_req",
    "positions",
    "boundary_token_indices",
    "block_table",
    "rms_norm_weight",
    "cos_sin_cache",
    "kv_slot_mapping",
    "kv_cache",
)
_INTEGERS = ("block_size", "compress_ratio")
_EPS = "rms_norm_eps"
# Where there is no memory, an address is a view's offset, which is less than any machine's memory.
_LOWEST = 1 << 40
_WANTED = "a tensor (torch, numpy, or another that exports DLPack)"


def explain(error: Exception, arguments: Sequence[object], operands: Sequence[str] = OPERANDS) -> Exception:
    """The error to raise for a failed call with these arguments, tensors first, in the order of `operands`:
    a DeviceError, a TypeError or ValueError naming the argument, or `error` itself where it already says what
    is wrong."""
    refused = device_error(error)
    if refused is not None:
        return refused
    for name, value in zip(operands, arguments, strict=False):
        try:
            fault = _operand_fault(name, value)
        except Exception as refusal:
            words = str(refusal).partition("\n")[0]
            fault = ValueError(f"{name}: wanted {_WANTED}, found an object that cannot be looked at: {words}")
        if fault is not None:
            return fault
    for name, value in zip(_INTEGERS, arguments[len(operands) :], strict=False):
        if not _converts(operator.index, value):
            return TypeError(f"{name}: wanted an integer, found {_kind(value)}")
    if len(arguments) > len(operands) + len(_INTEGERS):
        eps = arguments[-1]
        if not _converts(operator.index, eps) and not _converts(float, eps):
            return TypeError(f"{_EPS}: wanted a number, found {_kind(eps)}")
    named = str(error).partition(":")[0] in (*operands, *_INTEGERS, _EPS)
    if isinstance(error, MemoryError) or (named and isinstance(error, (TypeError, ValueError))):
        return error
    return _export_fault(error, arguments, operands)


def _converts(convert: Callable[[Any], object], value: object) -> bool:
    """Whether a scalar can be had from the value: an array of text has the method, and raises."""
    try:
        if isinstance(value, (str, bytes, bytearray)):
            return False
        convert(value)
    except Exception:
        return False
    return True


def refuse_odd(*operands: Any) -> None:
    """Raises for a tensor of torch that DLPack would describe untruly: one that stands for something else
    than its memory holds, or has none. `explain` then names it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    kind = torch.Tensor
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may make what it likes of an operation
        for value in operands:
            if isinstance(value, kind) and (value.data_ptr() < _LOWEST or value.is_neg()):
                fault = _torch_fault("tensor", value, torch)
                if fault is not None:
                    raise fault


def new_zeros(kv_cache: Any) -> Any:
    """A zeroed, contiguous tensor of kv_cache's shape, dtype and device. TypeError or ValueError for what is
    no tensor, or one without plain memory."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(kv_cache, torch.Tensor):
        fault = _torch_fault("kv_cache", kv_cache, torch)
        if fault is not None:
            raise fault
        return torch.zeros(kv_cache.shape, dtype=kv_cache.dtype, device=kv_cache.device)
    if numpy is not None and isinstance(kv_cache, numpy.ndarray):
        return numpy.zeros(kv_cache.shape, kv_cache.dtype)
    raise TypeError(f"kv_cache: wanted a torch tensor or a numpy array, found {_kind(kv_cache)}")


def _operand_fault(name: str, value: Any) -> Exception | None:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return _torch_fault(name, value, torch)
    if numpy is not None and isinstance(value, numpy.ndarray):
        if not value.flags.writeable:
            # DLPack has no way to hand out a read-only array, so inputs need to be writable too.
            return ValueError(f"{name}: wanted a writable array, found a read-only one; pass a copy of it")
        if value.dtype.kind not in "iufb" or not value.dtype.isnative:
            return TypeError(f"{name}: wanted numbers in native byte order, found dtype {value.dtype}")
        return None
    if hasattr(type(value), "__dlpack__") or hasattr(type(value), "__tvm_ffi_object__"):
        return None
    return TypeError(f"{name}: wanted {_WANTED}, found {_kind(value)}")


def _torch_fault(name: str, value: Any, torch: Any) -> Exception | None:
    if any(cls.__name__ == "FakeTensor" for cls in type(value).__mro__):
        return ValueError(f"{name}: wanted a tensor with data, found a FakeTensor (a call being traced?)")
    if value.is_meta:
        return ValueError(f"{name}: wanted a tensor with data, found one on the meta device")
    if value.is_nested:
        return ValueError(f"{name}: wanted one tensor, found a nested one; call to_padded_tensor()")
    if value.layout != torch.strided:
        return ValueError(f"{name}: wanted a strided tensor, found layout {value.layout}; call to_dense()")
    if value.is_quantized:
        return TypeError(f"{name}: wanted a plain dtype, found the quantized {value.dtype}")
    if torch._is_functional_tensor(value):
        return ValueError(f"{name}: wanted a tensor with data, found a functional one (a call being traced?)")
    if value.is_neg():
        return ValueError(f"{name}: wanted plain values, found ones to negate when read; call resolve_neg()")
    if value.numel() > 0 and not _has_memory(value):
        return ValueError(f"{name}: wanted memory behind its elements, found a storage of 0 bytes (freed?)")
    return None


def _has_memory(value: Any) -> bool:
    """False for a tensor whose storage has no bytes; what has no storage is for the export to refuse."""
    try:
        return bool(value.untyped_storage().data_ptr())
    except Exception:
        return True


def _export_fault(error: Exception, arguments: Sequence[object], operands: Sequence[str]) -> Exception:
    import tvm_ffi

    for name, value in zip(operands, arguments, strict=False):
        try:
            tvm_ffi.from_dlpack(value)
        except Exception as refusal:
            words = str(refusal).partition("\n")[0]
            return ValueError(f"{name}: wanted a tensor that DLPack can export, found: {words}")
    return error


def _kind(value: object) -> str:
    return (
        "None"
        if value is None
        else f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
    )
