"""A fresh process from its start to its first result; prints what each step took, as JSON.

    python -m acceptance.first_result BUNDLE DEVICE SPAWNED

SPAWNED: the parent's time.monotonic() when it started this process.
"""

import time

STARTED = time.monotonic()


def main() -> None:
    import json
    import sys

    from acceptance.isolation import compiler_libraries, hide_triton, mapped_libraries, triton_modules

    bundle, device, spawned = sys.argv[1], sys.argv[2], float(sys.argv[3])
    steps = {"interpreter": STARTED - spawned}
    last = time.monotonic()

    def step(name: str) -> None:
        nonlocal last
        now = time.monotonic()
        steps[name] = now - last
        last = now

    hide_triton()
    import torch

    step("torch import")
    is_gpu = device != "cpu"
    torch.zeros(1, device=device)
    if is_gpu:
        torch.cuda.synchronize(device)
    step("context")
    from kvbuild.kernels.workloads import Workload, make

    inputs = make(Workload.decode(8, 128), device=device)
    before = inputs.kv_storage.clone()
    same = bool((before == inputs.kv_storage).all())
    step("operands")
    libraries = mapped_libraries()
    last = time.monotonic()

    from kvbuild import runtime

    step("import kvbuild.runtime")
    operator = runtime.load(bundle, device=device)
    step("load")
    operator.compress(*inputs.call_args())
    if is_gpu:
        torch.cuda.synchronize(device)
    step("first call")
    operator.compress(*inputs.call_args())
    if is_gpu:
        torch.cuda.synchronize(device)
    step("second call")
    added = mapped_libraries() - libraries
    print(json.dumps({
        "steps_ms": {name: 1e3 * seconds for name, seconds in steps.items()},
        "wrote": same and not bool((before == inputs.kv_storage).all()),
        "libraries": sorted(added),
        "compilers": compiler_libraries(added),
        "triton": triton_modules(),
    }))


if __name__ == "__main__":
    main()
