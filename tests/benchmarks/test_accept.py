"""The acceptance script: it runs whole on the cpu, and it sees a wrong byte, a wrong variant, a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbuild import runtime

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "acceptance"]:
        del sys.modules[name]


@dataclass(frozen=True)
class Variant:
    ratio: int
    layout: str
    max_outputs: int | None
    scratch_per_output: int = 0

    @property
    def name(self) -> str:
        return f"c{self.ratio}-{self.layout}-{self.max_outputs or 'any'}"


VARIANTS = (
    Variant(128, "aligned", 16), Variant(128, "aligned", None), Variant(128, "general", 48),
    Variant(128, "general", None), Variant(256, "general", None),
)  # fmt: skip


class Spoiled:
    """An operator that gives one wrong byte in launches of several outputs."""

    variants = ()

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def compress(self, *arguments: Any) -> Any:
        result = self._operator.compress(*arguments)
        boundaries, slots, cache = arguments[3], arguments[7], arguments[8]
        if boundaries.shape[0] > 1:
            slot = int(slots[boundaries[0]])
            cache[slot // 64, slot % 64 * 576] += 3
        return result

    def counters(self) -> dict[str, Any]:
        return self._operator.counters()


def accept(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "accept.py"), *map(str, arguments)]
    # One thread: torch's own wait for one another on a busy machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KVBUILD_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_it_runs_whole_on_the_cpu(cpu_bundle: Path, tmp_path: Path) -> None:
    done = accept(cpu_bundle, "--device", "cpu", "--quick", "--only", "checks", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("all passed")
    written = json.loads((tmp_path / "accept.json").read_text())
    passed = {check["section"] for check in written["checks"] if check["status"] == "passed"}
    assert passed == {"workloads", "decode", "odd launches", "equal bytes", "parallel", "refusals", "callers",
                      "isolation"}
    assert written["failed"] == [] and written["bundle"]["target"].startswith("cpu:")
    assert "| workloads: prefill-1x8192-c128 | passed |" in (tmp_path / "accept.md").read_text()


def test_what_it_cannot_use_is_a_wrong_request(cpu_bundle: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.kvb"
    damaged.write_bytes(cpu_bundle.read_bytes()[:-1])
    for bundle, words in ((tmp_path / "absent.kvb", "wanted a .kvb file"), (damaged, "damaged.kvb: ")):
        done = accept(bundle, "--device", "cpu", "--out", tmp_path)
        assert (done.returncode, words in done.stderr, "Traceback" in done.stderr) == (2, True, False), done


def test_a_wrong_byte_is_seen(cpu_bundle: Path) -> None:
    from acceptance import exact, launches, parallel
    from acceptance.record import Check, Record, Refused

    from kvbuild.aot.measure.place import Place

    operator = runtime.load(cpu_bundle, device="cpu")
    operator = SimpleNamespace(compress=operator.compress, counters=operator.counters, variants=())
    place = Place(torch.device("cpu"))
    inputs = launches.windows(2, 128, place.device)
    launch = launches.judged(operator, inputs)
    spoiled = Spoiled(operator)
    assert int(launches.repeat(operator, [launch], 3)) == 0
    assert int(launches.repeat(spoiled, [launch], 3)) == 3
    for wrong in (lambda: launches.judged(spoiled, inputs), lambda: parallel.fork(spoiled, place),
                  lambda: exact._equal_bytes(Check("", ""), spoiled, place, 128)):
        with pytest.raises(Refused):
            wrong()
    record = Record()
    with record.check("section", "name"):
        launches.judged(spoiled, inputs)
    assert [check.name for check in record.failed] == ["name"] and "wrong" in record.failed[0].detail


def test_the_same_launch_laid_out_otherwise(cpu_bundle: Path) -> None:
    from acceptance import launches

    operator = runtime.load(cpu_bundle, device="cpu")
    base = launches.windows(2, 128, torch.device("cpu"))
    launch = launches.judged(operator, base)
    wanted = launches.slot_bytes(base.with_(kv_cache=launch.wanted.as_strided(
        tuple(base.kv_cache.shape), base.kv_cache.stride(), base.kv_cache.storage_offset())),
        base.boundary_token_indices)
    for name, lay_out in launches.GENERAL_LAYOUTS.items():
        inputs = lay_out(base).fresh()
        aligned = (inputs.block_size == 8 and inputs.rms_norm_weight.dtype == torch.bfloat16
                   and inputs.state_cache.stride(0) % 16 == 0 and inputs.kv_cache.stride(0) % 16 == 0)
        assert not aligned, name
        operator.compress(*inputs.call_args())
        assert torch.equal(launches.slot_bytes(inputs, inputs.boundary_token_indices), wanted), name


def test_which_variant_a_call_takes() -> None:
    from acceptance import launches

    taken = [launches.chosen(VARIANTS, 128, aligned, outputs).name
             for aligned, outputs in ((True, 16), (True, 17), (False, 48), (False, 49))]
    assert taken == ["c128-aligned-16", "c128-aligned-any", "c128-general-48", "c128-general-any"]
    assert launches.output_counts(VARIANTS, 128) == [1, 3, 16, 17, 48, 49]
    assert launches.occasions(VARIANTS, 128) == {
        "c128-aligned-16": (True, 1), "c128-aligned-any": (True, 17), "c128-general-48": (False, 1),
        "c128-general-any": (False, 49)}


def test_a_compiler_is_seen(tmp_path: Path) -> None:
    from acceptance.isolation import Isolation, compiler_libraries

    watched = Isolation(tmp_path)
    (tmp_path / "index").write_text("")
    assert watched.compiled_by_driver() == 0
    (tmp_path / "0" / "1").mkdir(parents=True)
    (tmp_path / "0" / "1" / "kernel").write_text("")
    watched.programs += [sys.executable, "/usr/bin/cc"]
    assert watched.compiled_by_driver() == 1 and watched.foreign_programs() == ["/usr/bin/cc"]
    assert compiler_libraries({"libc.so.6", "libnvrtc.so.13", "libnvidia-ptxjitcompiler.so.1"}) == [
        "libnvidia-ptxjitcompiler.so.1", "libnvrtc.so.13"]


def test_triton_is_hidden() -> None:
    code = (
        "from acceptance import isolation\n"
        "isolation.install()\n"
        "import importlib.util, subprocess\n"
        "assert importlib.util.find_spec('triton') is None\n"
        "try:\n    import triton.language\nexcept ModuleNotFoundError:\n    print('hidden')\n"
        "print(isolation.triton_modules())"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=60)
    assert done.stdout == "hidden\n[]\n", done.stderr
