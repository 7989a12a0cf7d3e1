"""Runs in a process of its own: what a serving process does with a bundle for an NPU.

    serve.py BUNDLE RELABEL_LIBRARY

torch's tensors of the cpu say that they lie on npu:0, and a module stands in for torch_npu's current stream.
"""

from __future__ import annotations

import ctypes
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from kvbuild import runtime
from kvbuild.kernels.contract import COMPRESS_RATIOS
from kvbuild.kernels.oracle import expect
from kvbuild.kernels.verdict import judge
from kvbuild.kernels.workloads import Inputs, Workload, make

NPU = 12


def relabel(library: str) -> None:
    """From here on torch's cpu tensors say that they lie on npu:0."""
    shim = ctypes.CDLL(library)
    python = ctypes.pythonapi
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    python.PyCapsule_New.restype = ctypes.py_object
    python.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    shim.kvb_relabel.restype = ctypes.c_void_p
    shim.kvb_relabel.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    name = b"dlpack_exchange_api"
    own = python.PyCapsule_GetPointer(torch.Tensor.__dlpack_c_exchange_api__, name)
    api = shim.kvb_relabel(own, NPU, 0)
    torch.Tensor.__dlpack_c_exchange_api__ = python.PyCapsule_New(api, name, None)


def verdict(x: Inputs, left: torch.Tensor, before: torch.Tensor) -> tuple[bool, str]:
    found = judge(left, before, expect(*x.call_args()))
    return found.right, str(found)


def results(op: Any, ratio: int) -> dict[str, tuple[bool, str]]:
    """How each way of calling compares with the oracle."""
    x = make(Workload(2, 6 * ratio, ratio))
    whole, bound = x.fresh(), x.fresh()
    op.compress(*whole.call_args())
    step = op.bind(
        state_cache=bound.state_cache, block_table=bound.block_table, rms_norm_weight=bound.rms_norm_weight,
        cos_sin_cache=bound.cos_sin_cache, kv_cache=bound.kv_cache, block_size=bound.block_size,
        compress_ratio=ratio,
    )  # fmt: skip
    step(bound.token_to_req, bound.positions, bound.boundary_token_indices, bound.kv_slot_mapping)
    new = op.c128_256_512_compress(*x.call_args())
    return {
        "compress": verdict(x, whole.kv_cache, x.kv_cache),
        "step": verdict(x, bound.kv_cache, x.kv_cache),
        "new": verdict(x, new, torch.zeros_like(x.kv_cache)),
    }


def main() -> None:
    bundle, library = sys.argv[1:]
    torch_npu = ModuleType("torch_npu")
    vars(torch_npu)["_C"] = SimpleNamespace(_npu_getCurrentRawStream=lambda index: 41)
    sys.modules["torch_npu"] = torch_npu
    relabel(library)
    try:
        op = runtime.load(bundle, "npu")
    except runtime.KvbuildError as error:
        print(json.dumps({"refused": [type(error).__name__, str(error)]}))
        return
    with op:
        verdicts = {str(ratio): results(op, ratio) for ratio in COMPRESS_RATIOS}
        said = {"verdicts": verdicts, "device": op.device, "target": op.target.name}
        print(json.dumps({**said, "counters": op.counters()}))


if __name__ == "__main__":
    main()
