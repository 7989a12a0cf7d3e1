"""Runs in a process of its own: opens the launcher and answers requests, one JSON line each.

    executor.py FOLDER < requests > answers

A request: {"make": {"kind", ...}, "variants": [place, or -1 for the launcher's choice], "stream": 0}. The
answer has, for each variant, how the bytes compare with the oracle, their digest, and the launcher's refusal
if there was one. {"together": true}: the variants' calls are put on streams of their own, and only then does
the device work on any of them.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import client
import torch
from torch import Tensor

from kvbuild.kernels.contract import OPERANDS
from kvbuild.kernels.odd_cases import far_rows, odd_case, random_case
from kvbuild.kernels.oracle import Expectation, expect
from kvbuild.kernels.verdict import changed_outside, judge
from kvbuild.kernels.workloads import Inputs, Workload, make

NPU = 12
_DTYPES = {
    torch.float32: "float32", torch.int32: "int32", torch.int64: "int64", torch.bfloat16: "bfloat16",
    torch.uint8: "uint8",
}  # fmt: skip


def inputs_of(kind: str, **options: Any) -> Inputs:
    """The operands that a request describes."""
    if kind == "odd":
        return odd_case(options.pop("name"), **options)
    if kind == "random":
        return random_case(options.pop("seed"), **options)
    if kind == "far":
        return far_rows(**options)
    given = Workload.decode if kind == "decode" else Workload
    workload = given(*options.pop("workload"))
    if options.pop("fp32_weight", False):
        options["weight_dtype"] = torch.float32
    return make(workload, **options)


def described(tensor: Tensor) -> client.DLTensor:
    """A tensor as the launcher sees it, said to lie on an NPU."""
    return client.tensor(
        tuple(tensor.shape), _DTYPES[tensor.dtype], tensor.data_ptr(), tensor.stride(), (NPU, 0)
    )


def call_of(x: Inputs) -> dict[str, Any]:
    """The launcher's arguments."""
    tensors = {operand.name: described(getattr(x, operand.name)) for operand in OPERANDS}
    return {**tensors, "block_size": x.block_size, "compress_ratio": x.compress_ratio,
            "rms_norm_eps": x.rms_norm_eps}  # fmt: skip


class Npu:
    """The opened launcher and the stand-in's own entry points."""

    def __init__(self, folder: Path) -> None:
        manifest = (folder / "manifest.json").read_bytes()
        blobs = {path.name: path.read_bytes() for path in (folder / "blobs").iterdir()}
        os.environ["KVB_TEST_LAUNCHER"] = str(folder / "launcher.so")
        os.environ["KVB_TEST_MANIFEST"], os.environ["KVB_TEST_BLOBS"] = manifest.decode(), "{}"
        self.launcher = client.Launcher()
        self.acl = ctypes.CDLL("libascendcl.so")
        failure = self.launcher.open(0, blobs=blobs)
        if failure is not None:
            raise SystemExit(failure[1])

    def pin(self, variant: int) -> None:
        code = self.launcher.library.kvb_pin(0, ctypes.c_int64(variant))
        assert code == 0, self.launcher.answer(code)

    def start(self, x: Inputs, variant: int, stream: int) -> tuple[Inputs, Any]:
        """Puts a call on a stream: what it will write, in a kv_cache of its own, and the refusal."""
        after = x.fresh()
        self.pin(variant)
        return after, self.launcher.compress(call_of(after), stream)

    def wait(self, stream: int) -> None:
        self.acl.aclrtSynchronizeStream(ctypes.c_void_p(stream))


def compare(x: Inputs, after: Inputs, oracle: Expectation) -> dict[str, Any]:
    """How the bytes compare with the oracle's."""
    verdict = judge(after.kv_cache, x.kv_cache, oracle)
    return {
        "right": verdict.right, "words": str(verdict), "outputs": verdict.outputs,
        "ties": verdict.ties, "compared": verdict.bytes_compared,
        "outside": changed_outside(after.kv_storage, x.kv_storage, x.kv_cache),
        "digest": hashlib.sha256(after.kv_storage.numpy().tobytes()).hexdigest(),
    }  # fmt: skip


def answer(npu: Npu, request: dict[str, Any]) -> Any:
    """The answer to one request."""
    x = inputs_of(**request["make"])
    oracle = expect(*x.call_args())
    apart = request.get("together", False)
    streams = [request.get("stream", 0) + apart * (1 + i) for i in range(len(request["variants"]))]
    left = []
    for place, stream in zip(request["variants"], streams, strict=True):
        left.append(npu.start(x, place, stream))
        if not apart:
            npu.wait(stream)
    for stream in reversed(streams):
        npu.wait(stream)
    found = [{**compare(x, after, oracle), "refusal": refusal} for after, refusal in left]
    return {"results": found, "counters": npu.launcher.counters(0)}


def main() -> None:
    npu = Npu(Path(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(answer(npu, json.loads(line))), flush=True)
    npu.launcher.close(0)


if __name__ == "__main__":
    main()
