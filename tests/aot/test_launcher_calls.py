"""Calls through Python down to a stand-in driver: how often each asks the driver, and for what.

The numbers are counts: a driver's functions cost 50 to 200 ns each, which no test here could time.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import pytest

pytest.importorskip("torch")

BEGIN = """
import json, sys
from pathlib import Path
import callers
bench = callers.Bench(Path(sys.argv[1]), RELABELLED)
"""
CURRENT = "bench.make_current(); bench.counts()\n"


@pytest.fixture(scope="module")
def folder(session_folder: Path) -> Path:
    with open(session_folder / "callers.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = session_folder / "callers"
        if not (made / "target.json").exists():
            harness.build_callers(made)
    return made


def run(folder: Path, scenario: str, relabelled: bool = True) -> Any:
    command = [sys.executable, "-c", f"RELABELLED = {relabelled}\n{BEGIN}{scenario}", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(harness.HERE)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_launch_asks_the_driver_twice(folder: Path) -> None:
    """Which context is current, and the launch; whoever calls."""
    found = run(
        folder,
        CURRENT
        + """
found = {}
for name, call in callers.callers(bench, 8).items():
    call()
    bench.counts()
    call()
    found[name] = bench.counts()
print(json.dumps(found))
""",
    )
    assert found.pop("nothing") == {}
    assert set(found) == {"compress", "compress by keywords", "compress, plain", "bound", "torch.ops"}
    for name, counts in found.items():
        assert counts == {"cuCtxGetCurrent": 1, "cuLaunchKernelEx": 1}, name


def test_what_more_other_calls_ask(folder: Path) -> None:
    found = run(
        folder,
        """
def calls(outputs, ratio=128):
    inputs = bench.inputs(outputs, ratio)
    given, step = inputs.call_args(), bench.bound(inputs)
    varying = [getattr(inputs, name) for name in callers.VARYING]
    both = []
    for call in (lambda: bench.operator.compress(*given), lambda: step(*varying)):
        bench.counts()
        call()
        both.append(bench.counts())
    assert both[0] == both[1], both
    return both[0]
elsewhere = calls(4)
"""
        + CURRENT
        + "print(json.dumps([elsewhere, calls(4), calls(0), calls(8, 512)]))",
    )
    assert found == [
        {"cuCtxGetCurrent": 1, "cuCtxPushCurrent": 1, "cuLaunchKernel": 1, "cuCtxPopCurrent": 1},
        {"cuCtxGetCurrent": 1, "cuLaunchKernel": 1},
        {},
        {"cuCtxGetCurrent": 1, "cuMemAllocFromPoolAsync": 1, "cuLaunchKernel": 2, "cuMemFreeAsync": 1},
    ]


def test_direct_calls_launch_what_plain_ones_do(folder: Path, tmp_path: Path) -> None:
    """Kernel, grid, stream, context and every argument's bytes, by a driver that writes them down."""
    recording = tmp_path / "recording"
    recording.mkdir()
    for name in ("launcher.so", "relabel.so", "target.json"):
        (recording / name).symlink_to(folder / name)
    harness.build_standin("nvidia", recording / "driver", folder / "cache")
    description = json.loads((folder / "target.json").read_text())
    sizes = [str(arg["size"]) for arg in description["target"]["kernels"][0]["args"]]
    log = tmp_path / "calls.jsonl"
    count = run(
        recording,
        f"""
import os
from kvbuild.kernels.odd_cases import random_case
os.environ["KVB_STANDIN_LOG"] = log = {str(log)!r}
os.environ["KVB_STANDIN_ARGS"] = {",".join(sizes)!r}
cases = [bench.inputs(outputs, ratio) for outputs in (1, 4, 8) for ratio in (128, 512)]
cases += [case for case in map(random_case, range(8)) if case.compress_ratio in (128, 512)]
operator = bench.operator
assert type(operator.compress).__name__ == "builtin_function_or_method"
for inputs in cases:
    given = inputs.call_args()
    for call in (lambda: type(operator).compress(operator, *given), lambda: operator.compress(*given),
                 lambda: bench.bound(inputs)(*(getattr(inputs, name) for name in callers.VARYING))):
        with open(log, "a") as file:
            print('{{"call": "begin"}}', file=file)
        call()
print(len(cases))
""",
    )
    made: list[list[dict[str, Any]]] = []
    for line in log.read_text().splitlines():
        call = json.loads(line)
        if call["call"] == "begin":
            made.append([])
        elif made:
            made[-1].append(call)
    assert len(made) == 3 * count and count >= 8
    for plain, direct, bound in zip(made[::3], made[1::3], made[2::3], strict=True):
        assert plain == direct == bound
    launches = harness.launches([call for calls in made for call in calls])
    assert len(launches) >= len(made) and {call["stream"] for call in launches} == {77}


def test_tensors_on_another_device_than_the_operators(folder: Path) -> None:
    """Both devices are open in the launcher, so that it would take them."""
    found = run(
        folder,
        """
from dataclasses import replace
from kvbuild.runtime.operator import Operator
launcher, facts = bench.operator._launcher, bench.operator.facts
description = json.loads((Path(sys.argv[1]) / "target.json").read_text())
manifest = json.dumps({"targets": [description["target"]]}, sort_keys=True, separators=(",", ":")).encode()
launcher.open(1, manifest, {name: bytes.fromhex(data) for name, data in description["blobs"].items()})
second = Operator(launcher, bench.operator.target, replace(facts, index=1))
inputs, said = bench.inputs(8), []
bench.counts()
try:
    second.compress(*inputs.call_args())
except ValueError as error:
    said.append(str(error))
said.append(bench.counts())
bench.operator.compress(*inputs.call_args())
said.append(bench.counts().get("cuLaunchKernelEx"))
print(json.dumps(said))
""",
    )
    assert found[0].startswith("kv_cache: wanted a tensor on cuda:1, which this operator was loaded for")
    assert found[1:] == [{}, 1]


def test_tensors_of_the_cpu_never_reach_a_device(folder: Path) -> None:
    """Neither read in place nor described by torch, directly or not."""
    found = run(
        folder,
        """
inputs, said = bench.inputs(8), []
operator = bench.operator
assert type(operator.compress).__name__ == "builtin_function_or_method"
fixed = {name: getattr(inputs, name) for name in (*callers.FIXED, "block_size", "compress_ratio")}
bench.counts()
for call in (lambda: operator.compress(*inputs.call_args()), lambda: operator.bind(**fixed)):
    try:
        call()
    except ValueError as error:
        said.append(str(error))
print(json.dumps([*said, bench.counts()]))
""",
        relabelled=False,
    )
    refused = "state_cache: wanted a tensor on a device of nvidia:sm_90, found one on cpu. Move it there"
    assert found == [refused, refused, {}]
