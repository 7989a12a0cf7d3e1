"""What `make demo` shows last: a bundle loaded for this machine, its bytes and time beside PyTorch's.

    python benchmarks/demo.py FILE.kvb

Computes the smallest benchmark workload, (1, 8192) tokens at ratio 128, compares every byte with the float64
oracle, and times the operator and the float32 PyTorch reference on the same operands. Exits 1 if a byte is
wrong. The times are those of a warm machine in the state it was found in; they are a demonstration, not a
benchmark.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from kvbuild import runtime
from kvbuild.aot.cli.output import table
from kvbuild.kernels import oracle, reference, verdict, workloads

REPEATS = 20


def main(path: str) -> int:
    operator = load(path)
    device = torch.device(operator.device)
    workload = workloads.WORKLOADS[0]
    inputs = workloads.make(workload, device=device)
    expected = oracle.expect(*inputs.call_args())

    own = inputs.fresh()
    operator.compress(*own.call_args())
    found = verdict.judge(own.kv_cache, inputs.kv_cache, expected)
    microseconds = timed(lambda: operator.compress(*own.call_args()), device)
    theirs = inputs.fresh()
    reference_microseconds = timed(lambda: reference.compress(*theirs.call_args()), device)

    work = f"{workload.num_outputs} outputs of {workload.compress_ratio} rows each"
    print(f"\n{work}, by {operator.target.name} on {device_text(device)}")
    head = ("bytes compared", "differing", "wrong", "time", "PyTorch reference", "ratio")
    row = (
        f"{found.bytes_compared:,}",
        f"{found.differing} (accepted ties)" if found.differing and found.right else str(found.differing),
        str(found.wrong + found.untouched_changed),
        f"{microseconds:,.0f} us",
        f"{reference_microseconds:,.0f} us",
        f"{reference_microseconds / microseconds:.1f}x",
    )
    print(table(head, [row], right=head))
    for fault in found.faults:
        print(f"  {fault}")
    return 0 if found.right else 1


def load(path: str) -> Any:
    """The operator for this machine's GPU where the bundle has one for it, else for its CPU."""
    if torch.cuda.is_available():
        try:
            return runtime.load(path, device="cuda:0")
        except runtime.NoMatchingArtifact as refusal:
            print(f"no artifact for the GPU here, so the CPU it is:\n{refusal}")
    return runtime.load(path, device="cpu")


def timed(call: Callable[[], object], device: torch.device) -> float:
    """The least time of a call in microseconds, until its result is there: other load only adds to it."""
    samples = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append(1e6 * (time.perf_counter() - begin))
    return min(samples)


def device_text(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"this CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: python benchmarks/demo.py FILE.kvb", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[1]))
