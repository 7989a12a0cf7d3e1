"""Calls of kvbuild.aot.measure.jit under Triton's interpreter: a script, for it changes its process.

Prints for each call its name, and how many bytes are wrong by the oracle.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from triton.runtime import interpreter

from kvbuild.aot.measure import jit
from kvbuild.kernels import oracle, verdict
from kvbuild.kernels.gpgpu.route import Tile
from kvbuild.kernels.workloads import Workload, make


class Native:
    """The interpreter's own module; it keeps a splatted comparison as integers, which its loads refuse."""

    def __init__(self, native: object) -> None:
        self.native = native

    def __getattr__(self, name: str) -> object:
        return getattr(self.native, name)

    def load(self, pointers: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return self.native.load(pointers, mask != 0, other, dtype)

    def store(self, pointers: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
        self.native.store(pointers, value, mask != 0)


interpreter._interpreter = Native(interpreter._interpreter)
torch.set_num_threads(1)
np.seterr(all="ignore")
for ratio in (128, 256):
    inputs = make(Workload.decode(2, ratio, 1))
    wanted = oracle.expect(*inputs.call_args())
    calls = {
        "whole window": lambda own: jit.whole_window(own, 64, 4),
        "one launch": lambda own: jit.same_kernels(own, Tile(4, 512, 1, 4, 1)),
        "two launches": lambda own: jit.same_kernels(own, Tile(4, 512, 4, 4, 1)),
    }
    for name, maker in calls.items():
        after = inputs.fresh()
        maker(after)()
        found = verdict.judge(after.kv_cache, inputs.kv_cache, wanted)
        wrong = found.wrong + found.untouched_changed
        print(f"{name}, ratio {ratio}: {found.outputs} outputs, {wrong} wrong")
