"""Registers loaded operators with torch.library, so that torch.compile and torch.export trace through a call.

Not imported by `kvbuild.runtime`: it needs torch 2.4 or later, which nothing else in the runtime does.

from kvbuild import runtime
from kvbuild.runtime import torch_library
compress = torch_library.register(runtime.load("compress.kvb", device="cuda:0"))
compress(state_cache, ..., kv_cache, block_size, compress_ratio)  # or torch.ops.kvbuild.compress
"""

from __future__ import annotations

import re
import threading
from typing import Any

import torch

from .arguments import OPERANDS
from .operator import Operator

NAME = "kvbuild::compress"
SCHEMA = (
    "(Tensor state_cache, Tensor token_to_req, Tensor positions, Tensor boundary_token_indices, "
    "Tensor block_table, Tensor rms_norm_weight, Tensor cos_sin_cache, Tensor kv_slot_mapping, "
    "Tensor(a!) kv_cache, SymInt block_size, SymInt compress_ratio, float rms_norm_eps=1e-06) -> ()"
)

_KV_CACHE = OPERANDS.index("kv_cache")
_DISPATCH_KEYS = ("CPU", "CUDA")

_lock = threading.Lock()
_registered: dict[str, _Registered] = {}


class _Registered:
    """One operator of torch, and the loaded operators that serve it, by device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.by_device: dict[torch.device, Operator] = {}
        namespace, _, plain = name.partition("::")
        # The registration lives as long as the library object. torch.library.custom_op would do the same at
        # a hundred times the cost of a call.
        self.library = torch.library.Library(namespace, "FRAGMENT")
        self.library.define(plain + SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
        for key in _DISPATCH_KEYS:
            self.library.impl(plain, self.run, key)
        torch.library.register_fake(name, _trace, lib=self.library)

    def run(self, *arguments: Any) -> None:
        device = arguments[_KV_CACHE].device
        operator = self.by_device.get(device)
        if operator is None:
            raise ValueError(
                f"kv_cache: wanted a tensor on a device that {self.name} was registered for "
                f"({', '.join(map(str, self.by_device))}), found one on {device}; load an operator for that "
                "device and register it too"
            )
        operator.compress(*arguments)


def _trace(*arguments: Any) -> None:
    """Nothing to compute: the one effect is on kv_cache, and the schema says so. torch asks this too where a
    single operand is a meta tensor, and nothing would be written to the others."""
    wanted = arguments[_KV_CACHE].device
    for name, value in zip(OPERANDS, arguments, strict=False):
        if value.device != wanted:
            raise ValueError(
                f"{name}: wanted a tensor on {wanted}, where kv_cache lies, found one on {value.device}; "
                "move it there"
            )


def register(operator: Operator, name: str = NAME) -> Any:
    """Makes the operator callable as torch.ops.NAMESPACE.OPERATOR, for tensors on its device.

    operator: a loaded operator; one registered before under this name for the same device is replaced.
    name:     "namespace::operator". Operators of several devices may share a name.

    Returns what torch.ops holds under the name. It takes the arguments of `Operator.compress` and, unlike
    that, returns None: its schema says that it mutates kv_cache, and torch wants no result that is an
    argument. Errors are those of `Operator.compress`; kv_cache on a device that none was registered for is a
    ValueError.

    Raises RuntimeError where torch is too old, TypeError or ValueError for a wrong argument.
    """
    if not isinstance(operator, Operator):
        raise TypeError(f"operator: wanted one that runtime.load returned, found {type(operator).__name__}")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*::[A-Za-z_]\w*", name):
        raise ValueError(f'name: wanted "namespace::operator", found {name!r}')
    if not hasattr(torch.library, "register_fake"):
        raise RuntimeError(
            f"torch_library: wanted torch 2.4 or later, which has torch.library.register_fake; found "
            f"{torch.__version__}. Update torch, or keep the call out of torch.compile"
        )
    namespace, _, plain = name.partition("::")
    with _lock:
        registered = _registered.get(name)
        if registered is None:
            _refuse_taken(name)
            registered = _registered[name] = _Registered(name)
        registered.by_device[torch.device(operator.device)] = operator
    return getattr(getattr(torch.ops, namespace), plain)


def _refuse_taken(name: str) -> None:
    """ValueError where torch has an operator of that name, or something else in the operator's place."""
    if torch._C._jit_get_schemas_for_operator(name):
        raise ValueError(f"name: wanted a free one, found that torch.ops has {name} already; choose another")
    # A namespace is an object with attributes of its own, which torch would give in the operator's place.
    namespace, _, plain = name.partition("::")
    space = getattr(torch.ops, namespace)
    is_space = isinstance(space, torch._ops._OpNamespace)
    if not is_space or hasattr(space, plain):
        own = plain if is_space else namespace
        raise ValueError(
            f"name: wanted one that torch leaves to operators, found {name}, of which torch keeps {own!r} to "
            "itself; choose another, such as my::compress"
        )
