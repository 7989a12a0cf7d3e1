"""Where torch keeps a tensor in its Python object, and the C functions that read it there.

torch keeps a set of C functions stable for compiled models (aoti_torch_*), which take a pointer to its own
kind of tensor. That tensor is one pointer inside the Python object, at a place that depends on how torch was
built: it is found by comparing objects with the handles that torch itself gives for them. Where nothing
fits, tensors are described by torch's DLPack exchange API, at several times the cost.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
from collections.abc import Iterator
from typing import Any

_WORD = ctypes.sizeof(ctypes.c_void_p)
# Behind the two words of any object; an older torch has a flag there first.
_OFFSETS = (2 * _WORD, 3 * _WORD)
_READERS = ("data_ptr", "dim", "sizes", "strides", "dtype", "device_type", "device_index")
# The keys of tensors that stand for something else than their memory holds.
_ODD_KEYS = ("Negative", "Conjugate", "ZeroTensor", "Functionalize")
_LONGEST = 24  # words in what a tensor points to
_DTYPES = ("float32", "int32", "int64", "bfloat16", "uint8")


class Place(ctypes.Structure):
    """The launcher's kvb_torch. All zero where tensors cannot be read in place."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _READERS), ("offset", ctypes.c_int64),
        ("plain", ctypes.c_void_p), ("dtypes", ctypes.c_int32 * len(_DTYPES)), ("place", ctypes.c_int32),
        ("memory", ctypes.c_void_p), ("keys", ctypes.c_int64), ("odd_keys", ctypes.c_uint64),
    )  # fmt: skip


def find(torch: Any, on_cpu: bool) -> Place:
    """What a launcher needs to read the tensors of this torch; on_cpu: whether the launcher is the cpu's."""
    try:
        library = ctypes.CDLL(torch._C.__file__)
        readers = [_address(library, f"aoti_torch_get_{name}") for name in _READERS]
        numbers = [getattr(library, f"aoti_torch_dtype_{name}")() for name in _DTYPES]
        kind = getattr(library, f"aoti_torch_device_type_{'cpu' if on_cpu else 'cuda'}")()
        memory = _address(library, "aoti_torch_get_storage_size")
        odd = functools.reduce(operator.or_, (_odd_key(torch, name) for name in _ODD_KEYS))
        found = _probe(torch, library)
    except Exception:  # whatever another torch, or a mode of this one, has to say
        return Place()
    if found is None:
        return Place()
    offset, plain, keys = found
    return Place(*readers, offset, plain, (ctypes.c_int32 * len(_DTYPES))(*numbers), kind, memory, keys, odd)


def _probe(torch: Any, library: ctypes.CDLL) -> tuple[int, int, int] | None:
    """The tensor's offset in its object, the first word of what it points to, and where in that its keys lie;
    None where tensors of the usual kind do not agree on them."""
    whole, shared = torch.empty(4, 3, device="cpu"), torch.empty(2, dtype=torch.int64, device="cpu")
    kept = torch.utils.dlpack.to_dlpack(shared)  # as some are: held by C++ too
    parameter = torch.nn.Parameter(torch.empty(1, device="cpu"))
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    probes = [whole, whole[1:, 1:], shared, parameter, empty]
    found = set()
    keys = set(range(0, _LONGEST * _WORD, _WORD))
    with _handles(torch, library, probes) as handles:
        for probe, handle in zip(probes, handles, strict=True):
            pointer = _word(handle)
            places = [at for at in _OFFSETS if at < type(probe).__basicsize__]
            fitting = [at for at in places if _word(id(probe) + at) == pointer]
            found.add((fitting[0], _word(pointer)) if fitting else None)
            of_probe = torch._C._dispatch_keys(probe).raw_repr()
            keys = {at for at in keys if _word(pointer + at) == of_probe}
    del kept
    place = found.pop() if len(found) == 1 else None
    return (*place, keys.pop()) if place is not None and len(keys) == 1 else None


@contextlib.contextmanager
def _handles(torch: Any, library: ctypes.CDLL, tensors: list[Any]) -> Iterator[list[int]]:
    """torch's own handles of these tensors: addresses of a pointer to each."""
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    pointer = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))
    delete = library.aoti_torch_delete_tensor_object
    handles = [pointer(each, None) for each in torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)]
    try:
        yield handles
    finally:
        for handle in handles:
            delete(ctypes.c_void_p(handle))


def _odd_key(torch: Any, name: str) -> int:
    kinds = torch._C
    return int(kinds.DispatchKeySet(getattr(kinds.DispatchKey, name)).raw_repr())


def _address(library: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def _word(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value
