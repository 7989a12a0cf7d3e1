"""Calls that hand torch's tensors to a launcher as they are: no TVM-FFI conversion, no Python between.

The launcher makes a built-in function that looks at tensors by torch's DLPack exchange API. Where it cannot
(another interpreter, a torch that is too old) nothing is missed: the plain function that it stands for takes
the same arguments and gives the same results, later. A call goes there too when an argument is no plain
tensor of torch.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from . import torch_place
from .arguments import OPERANDS, explain, refuse_odd

_CAPSULE = b"dlpack_exchange_api"
_DLPACK_MAJOR = 1
_places: dict[bool, torch_place.Place] = {}
# The launcher's KVB_* codes.
_KINDS: dict[int, type[Exception]] = {1: TypeError, 2: ValueError, 3: RuntimeError, 4: MemoryError}


class ExchangeAPI(ctypes.Structure):
    """DLPackExchangeAPI of DLPack 1, as far as it is used."""

    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("older", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p), ("managed_from_object", ctypes.c_void_p),
        ("managed_to_object", ctypes.c_void_p), ("tensor_from_object", ctypes.c_void_p),
    )  # fmt: skip


class _Given(ctypes.Structure):
    """The launcher's kvb_python_given."""

    _fields_ = (
        ("exchange", ctypes.c_void_p), ("types", ctypes.c_void_p * 2), ("plain", ctypes.py_object),
        ("refuse", ctypes.py_object), ("keep", ctypes.py_object), ("closed", ctypes.c_void_p),
        ("device_id", ctypes.c_int64), ("torch", torch_place.Place), ("usual", ctypes.py_object),
    )  # fmt: skip


def exchange_api() -> int | None:
    """The address of torch's DLPack exchange API; None where torch is not imported or has none, or the
    interpreter is not a CPython with one lock."""
    torch = sys.modules.get("torch")
    if sys.implementation.name != "cpython" or "t" in sys.abiflags:
        return None
    capsule = getattr(getattr(torch, "Tensor", None), "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    # A prototype of its own: others use ctypes.pythonapi's too.
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    try:
        address: int = capsule if isinstance(capsule, int) else pointer(capsule, _CAPSULE)
    except ValueError:
        return None
    return address if ExchangeAPI.from_address(address).major == _DLPACK_MAJOR else None


def whole(library: ctypes.CDLL, plain: Callable[..., Any], closed: ctypes.c_int32, device: str) -> Any:
    """The function to call as an operator's `compress`: a direct one where it can be had, else `plain`.

    library: the launcher
    plain:   serves what the direct function does not; must not refer to what holds the direct function
    closed:  not 0 once the operator is closed, which `plain` then says
    device:  the operator's; for tensors elsewhere `plain` has words
    """
    given = _given(plain, partial(_refuse, OPERANDS), closed, device)
    make = _maker(library, "kvb_python_compress", ctypes.POINTER(_Given))
    return (given and make and make(given)) or plain


def step(
    library: ctypes.CDLL,
    plain: Callable[..., Any],
    closed: ctypes.c_int32,
    device: str,
    fixed: tuple[Any, ...],
    varying: Sequence[str],
    block_size: Any,
    compress_ratio: Any,
    rms_norm_eps: Any,
) -> Any:
    """The same for the step of bound operands.

    plain:   the step that serves the rest; it has checked the operands
    fixed:   the tensors in the launcher's order, kept alive by the function, which returns the last
    varying: the names of what a step takes
    """
    given = _given(plain, partial(_refuse, varying), closed, device)
    objects = ctypes.py_object * len(fixed)
    scalars = (ctypes.c_int64, ctypes.c_int64, ctypes.c_double)
    make = _maker(library, "kvb_python_step", ctypes.POINTER(_Given), objects, *scalars)
    if given is None or make is None:
        return plain
    numbers = (operator.index(block_size), operator.index(compress_ratio), float(rms_norm_eps))
    return make(given, objects(*fixed), *numbers) or plain


def _place(on_cpu: bool) -> torch_place.Place:
    place = _places.get(on_cpu) or torch_place.find(sys.modules["torch"], on_cpu)
    if place.plain:  # else it may be found later: modes of torch that are active now can be in the way
        _places[on_cpu] = place
    return place


def _given(
    plain: Callable[..., Any], refuse: Callable[..., NoReturn], closed: ctypes.c_int32, device: str
) -> _Given | None:
    exchange = exchange_api()
    if exchange is None:
        return None
    kind, _, index = device.partition(":")
    torch = sys.modules["torch"]
    types = (ctypes.c_void_p * 2)(id(torch.Tensor), id(torch.nn.Parameter))
    return _Given(
        exchange, types, plain, refuse, ctypes.py_object(closed), ctypes.addressof(closed),
        int(index or 0), _place(kind == "cpu"), refuse_odd,
    )  # fmt: skip


def _maker(library: ctypes.CDLL, name: str, *arguments: Any) -> Callable[..., Any] | None:
    """The launcher's function of that name, to be called with the interpreter's lock; None where it is too
    old to have one."""
    function = getattr(library, name, None)
    address = ctypes.cast(function, ctypes.c_void_p).value if function is not None else None
    if address is None:
        return None
    made: Callable[..., Any] = ctypes.PYFUNCTYPE(ctypes.py_object, *arguments)(address)
    return made


def _refuse(operands: Sequence[str], code: int, words: str, arguments: tuple[Any, ...]) -> NoReturn:
    raise explain(_KINDS[code](words), arguments, operands) from None
