"""What a process pays until its first result, and what a call costs the calling thread."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvbuild.aot.measure import timing
from kvbuild.aot.measure.place import Place
from kvbuild.kernels.workloads import Inputs, Workload, make

from . import launches
from .record import NotRun, Record

IMPORT_BAR_MS = 100.0
LOAD_BAR_MS = 50.0
OWN_STEPS = ("interpreter", "import kvbuild.runtime", "load", "first call")
BATCH = 200
PROCESS_SECONDS = 180


def run(record: Record, operator: Any, place: Place, bundle: Path, quick: bool) -> None:
    times = record.times.setdefault("start", {})
    devices = dict.fromkeys((str(place.device), "cpu"))
    for device in devices:
        with record.check("start", f"fresh processes, {device}") as check:
            if device == "cpu" and place.is_gpu and not has_cpu_target(bundle):
                raise NotRun("the bundle has no cpu target for this host")
            samples = [_process(bundle, device) for _ in range(2 if quick else 5)]
            taken = [sample["steps_ms"] for sample in samples]
            steps = {name: [each[name] for each in taken] for name in taken[0]}
            medians = {name: statistics.median(values) for name, values in steps.items()}
            own = sum(medians[name] for name in OWN_STEPS)
            times[device] = {"median_ms": medians, "samples_ms": steps, "own_ms": own}
            check["median_ms"], check["libraries"] = medians, samples[-1]["libraries"]
            check.expect(all(sample["wrote"] for sample in samples), "a first call wrote nothing")
            foreign = [name for sample in samples for name in sample["compilers"] + sample["triton"]]
            check.expect(not foreign, f"load and the first call brought in {', '.join(sorted(set(foreign)))}")
            imported, loaded = medians["import kvbuild.runtime"], medians["load"]
            check.detail = (f"import {imported:.1f} ms, load {loaded:.1f} ms, first call "
                            f"{medians['first call']:.1f} ms; process start to first result {own:.0f} ms "
                            "apart from torch, context and operands")
            check.expect(imported < IMPORT_BAR_MS, f"import: wanted under {IMPORT_BAR_MS} ms; {check.detail}")
            check.expect(loaded < LOAD_BAR_MS, f"load: wanted under {LOAD_BAR_MS} ms; {check.detail}")
    with record.check("start", "what a call costs the calling thread") as check:
        if not place.is_gpu:
            raise NotRun("on the cpu a call is the work itself")
        few = make(Workload.decode(8, 128, 0), device=place.device)
        many = launches.windows(1024, 128, place.device)
        calls = {"8 outputs": few, "1 output": launches.first(few, 1), "1024 outputs": many,
                 "8 outputs, general": launches.float_weight(few)}
        times["call_us"] = {name: _call_us(operator, place, inputs) for name, inputs in calls.items()}
        check.numbers.update(times["call_us"])
        check.detail = ", ".join(f"{name} {each['median']:.1f} us" for name, each in times["call_us"].items())


def has_cpu_target(bundle: Path) -> bool:
    """Whether the bundle can be loaded for this host's processor."""
    from kvbuild import runtime

    try:
        runtime.load(bundle, device="cpu").close()
    except runtime.NoMatchingArtifact:
        return False
    return True


def _process(bundle: Path, device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "acceptance.first_result", str(bundle.resolve()), device]
    folder = Path(__file__).resolve().parent.parent
    process = subprocess.run([*command, str(time.monotonic())], cwd=folder, capture_output=True, text=True,
                             timeout=PROCESS_SECONDS)
    if process.returncode != 0:
        raise RuntimeError(f"a fresh process failed: {process.stderr[-800:]}")
    return json.loads(process.stdout.splitlines()[-1])


def _call_us(operator: Any, place: Place, inputs: Inputs) -> dict[str, float]:
    """Microseconds until a call returns; the device is idle when a batch begins and is never waited for.

    median: of single calls; batch: the least mean of a batch, which the clock's own cost is not in.
    """
    own = inputs.fresh().call_args()
    # So many calls of this work that the launch queue cannot fill up.
    size = BATCH if inputs.boundary_token_indices.shape[0] <= 64 else 20
    single, batch = timing.until_returned(lambda: operator.compress(*own), place.synchronize, size)
    return {"median": single.median, "batch": batch}
