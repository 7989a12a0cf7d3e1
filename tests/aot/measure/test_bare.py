"""The bare launch is the launcher's own: the same driver calls with the same bytes, by a stand-in driver."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "standin"))
import harness

SCENARIO = """
import torch
from kvbuild.aot.measure.bare import BareLaunch
from kvbuild.kernels.workloads import Workload, make
from kvbuild.runtime.launchtable import Kernel, Variant
from kvbuild.runtime.strictjson import Node
target = json.loads(os.environ["KVB_TEST_MANIFEST"])["targets"][0]
kernels = tuple(Kernel.read(Node(each, "")) for each in target["kernels"])
variants = [Variant.read(Node(each, "")) for each in target["variants"]]
inputs = make(Workload.decode({outputs}, {ratio}, 0), page_pad=16, weight_dtype=getattr(torch, "{weight}"))
call = {{name: getattr(inputs, name) for name in (*NAMES, "block_size", "compress_ratio", "rms_norm_eps")}}
for name in NAMES:
    given = call[name]
    dtype = str(given.dtype).removeprefix("torch.")
    call[name] = tensor(tuple(given.shape), dtype, given.data_ptr(), given.stride())
kvb.open()
said = [kvb.compress(call, 77)]
bare = BareLaunch(kvb.blobs.__getitem__, kernels, variants[{variant}], inputs, 77)
bare.launch()
bare.empty()
say(said)
"""


@pytest.mark.parametrize(
    ("outputs", "ratio", "weight", "variant"),
    [(3, 128, "bfloat16", 0), (5, 128, "bfloat16", 1), (5, 128, "float32", 2), (8, 512, "bfloat16", 3)],
)
def test_it_launches_what_the_launcher_does(
    session_folder: Path, tmp_path: Path, outputs: int, ratio: int, weight: str, variant: int
) -> None:
    bench, driver = harness.gpu_bench("nvidia", session_folder)
    text = SCENARIO.format(outputs=outputs, ratio=ratio, weight=weight, variant=variant)
    said, calls = bench.run(text, tmp_path, driver)
    assert said == [None]
    launches = [call for call in calls if call["call"] == "launch"]
    half = len(launches) // 2
    assert half == (2 if ratio == 512 else 1)
    places = [arg["field"] for arg in bench.target["kernels"][0]["args"]]
    for own, bare in zip(launches[:half], launches[half:], strict=True):
        assert differing(own, bare) <= {"context", "arguments"}
        changed = {name for name, one, two in zip(places, own["arguments"], bare["arguments"], strict=False)
                   if one != two}  # fmt: skip
        assert changed <= {"scratch"}


def differing(one: dict[str, Any], two: dict[str, Any]) -> set[str]:
    return {key for key in one if one[key] != two[key]}
