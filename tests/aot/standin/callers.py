"""An operator over a stand-in driver, with torch's cpu tensors said to lie on cuda:0; runs in a subprocess.

As a script it shows what a call costs this host apart from the driver, by caller:

python tests/aot/standin/callers.py [OUTPUTS]
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvbuild.kernels.workloads import Inputs, Workload, make
from kvbuild.runtime import direct
from kvbuild.runtime.bound import FIXED, VARYING
from kvbuild.runtime.device import cpu_facts
from kvbuild.runtime.launcher import load_launcher
from kvbuild.runtime.launchtable import Variant
from kvbuild.runtime.operator import Operator
from kvbuild.runtime.strictjson import Node

CUDA = 2
PRIMARY = 0xC0  # the stand-in's primary context of device 0


def relabel(library: Path, device_id: int = 0) -> None:
    """From here on torch's cpu tensors say that they lie on cuda:device_id. Before the first call only."""
    shim = ctypes.CDLL(str(library))
    python = ctypes.pythonapi
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    python.PyCapsule_New.restype = ctypes.py_object
    python.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    shim.kvb_relabel.restype = ctypes.c_void_p
    shim.kvb_relabel.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    name = b"dlpack_exchange_api"
    own = python.PyCapsule_GetPointer(torch.Tensor.__dlpack_c_exchange_api__, name)
    api = shim.kvb_relabel(own, CUDA, device_id)
    torch.Tensor.__dlpack_c_exchange_api__ = python.PyCapsule_New(api, name, None)
    place = direct._place
    direct._place = lambda on_cpu: place(True)


class Bench:
    """A launcher for cuda:0 under the operator, and what a call of it is given.

    folder:     what harness.build_callers made.
    relabelled: whether torch's tensors of the cpu say that they lie on cuda:0.
    """

    def __init__(self, folder: Path, relabelled: bool = True) -> None:
        if relabelled:
            relabel(folder / "relabel.so")
        description = json.loads((folder / "target.json").read_text())
        target, blobs = description["target"], description["blobs"]
        driver = ctypes.CDLL(str(folder / "driver" / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
        self._driver = driver
        content = (folder / "launcher.so").read_bytes()
        launcher = load_launcher(hashlib.sha256(content).hexdigest(), content, os.uname().machine)
        manifest = json.dumps({"targets": [target]}, sort_keys=True, separators=(",", ":")).encode()
        launcher.open(0, manifest, {name: bytes.fromhex(data) for name, data in blobs.items()})
        facts = replace(cpu_facts(), vendor="nvidia", arch="sm_90", index=0)
        variants = tuple(Variant.read(Node(each, "")) for each in target["variants"])
        self.operator = Operator(launcher, SimpleNamespace(name="nvidia:sm_90", variants=variants), facts)

    def counts(self) -> dict[str, int]:
        """The driver's calls since the last time, by name; of a driver that counts."""
        counts = self._driver.kvb_standin_counts
        counts.restype = ctypes.c_char_p
        counted: dict[str, int] = json.loads(counts())
        return counted

    def make_current(self) -> None:
        """Makes the primary context current in this thread, as torch does in those that use the device."""
        self._driver.cuCtxPushCurrent_v2(ctypes.c_void_p(PRIMARY))

    def inputs(self, outputs: int = 8, ratio: int = 128) -> Inputs:
        return make(Workload.decode(outputs, ratio, 0))

    def bound(self, inputs: Inputs) -> Callable[..., Any]:
        scalars = ("block_size", "compress_ratio", "rms_norm_eps")
        return self.operator.bind(**{name: getattr(inputs, name) for name in (*FIXED, *scalars)})

    def registered(self) -> Any:
        """The operator in torch.ops, for tensors that torch takes for the cpu's."""
        from kvbuild.runtime import torch_library

        found = torch_library.register(self.operator, "kvbuild_standin::compress")
        serving = torch_library._registered["kvbuild_standin::compress"].by_device
        serving[torch.device("cpu")] = self.operator
        return found


def callers(bench: Bench, outputs: int) -> dict[str, Callable[[], object]]:
    """One call of each kind, ready to be made."""
    inputs = bench.inputs(outputs)
    given = inputs.call_args()
    varying = [getattr(inputs, name) for name in VARYING]
    step, registered, operator = bench.bound(inputs), bench.registered(), bench.operator
    names = Operator.compress.__code__.co_varnames[1:13]
    named = dict(zip(names, given, strict=True))
    return {
        "compress": lambda: operator.compress(*given),
        "compress by keywords": lambda: operator.compress(**named),
        "compress, plain": lambda: Operator.compress(operator, *given),
        "bound": lambda: step(*varying),
        "torch.ops": lambda: registered(*given),
        "nothing": lambda: None,
    }


def microseconds(call: Callable[[], object], size: int = 2000, batches: int = 15) -> float:
    """The least mean of a batch of calls."""
    means = []
    for _ in range(batches):
        begin = time.perf_counter_ns()
        for _ in range(size):
            call()
        means.append((time.perf_counter_ns() - begin) / 1e3 / size)
    return min(means)


if __name__ == "__main__":
    import harness

    with tempfile.TemporaryDirectory() as name:
        bench = Bench(harness.build_callers(Path(name)))
        bench.make_current()
        for caller, call in callers(bench, int(sys.argv[1]) if len(sys.argv) > 1 else 8).items():
            bench.counts()
            call()
            asked = json.dumps(bench.counts())
            print(f"{caller:22} {microseconds(call):6.3f} us  {asked}")
