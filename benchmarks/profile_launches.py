#!/usr/bin/env python3
"""Launches one workload a few times, for a profiler to look at.

    ncu --clock-control none -k regex:compress --launch-skip 4 --launch-count 1 --set full \\
        python3 benchmarks/profile_launches.py kvcompress.kvb decode-1-c512

Each launch reads other windows, together more than any L2 holds. --variant pins one of the bundle's variants
by its place in the manifest (`kvbuild inspect`). Exit 0; 2: the request was wrong.
"""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle")
    parser.add_argument("workload", help="as in the tables: prefill-1x8192-c128, decode-8-c512, ...")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--variant", type=int)
    arguments = parser.parse_args()

    import torch

    from kvbuild import runtime
    from kvbuild.aot.measure.rotation import cold_sets, rotation
    from kvbuild.aot.measure.versus import Effort

    workloads = {workload.name: workload for workload in Effort(quick=False).workloads()}
    if arguments.workload not in workloads:
        print(f"wanted one of {', '.join(workloads)}; found {arguments.workload}", file=sys.stderr)
        return 2
    workload = workloads[arguments.workload]
    try:
        operator = runtime.load(arguments.bundle, device=arguments.device)
        if arguments.variant is not None:
            operator.pin(arguments.variant)
    except (runtime.KvbuildError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    inputs, _pool = rotation(workload, torch.device(operator.device), cold_sets(workload))
    for at in range(arguments.calls):
        operator.compress(*inputs[at % len(inputs)].call_args())
    if torch.device(operator.device).type == "cuda":
        torch.cuda.synchronize()
    counted = {name: count for name, count in operator.counters()["launches"].items() if count}
    print(f"{workload.name}: {arguments.calls} calls on {operator.device}; launches: {counted}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
