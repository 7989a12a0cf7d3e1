"""The whole pipeline through the real launcher, on this host.

What is tested is the kernels' source, Triton's front end, the Ascend adapter and the launcher; not bishengir,
hivmc or a chip.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from bench import Bench, Executor
from hosttools import LEFT_OUT, WANTED

from kvbuild.kernels.ascend.pipeline import BLOCK_DIMS
from kvbuild.kernels.contract import COMPRESS_RATIOS
from kvbuild.kernels.odd_cases import ODD_CASES
from kvbuild.kernels.verdict import tie_refusals

if not os.environ.get(WANTED):
    pytest.skip(LEFT_OUT, allow_module_level=True)

# Every stage is compiled in the first test's setup.
pytestmark = pytest.mark.timeout(1800)

ROUTES = (("index_select", "dense"), ("block", "aligned"), ("block", "general"))


def right(results: list[dict[str, Any]]) -> set[str]:
    """Asserts that every byte is the oracle's, and gives the digests of what was left."""
    for result in results:
        assert result["refusal"] is None
        assert result["right"], result["words"]
        assert result["outside"] == 0
    return {result["digest"] for result in results}


def routes(bench: Bench, ratio: int, small: bool = False) -> list[int]:
    return [bench.variant(route, ratio, layout, small=small) for route, layout in ROUTES]


@pytest.mark.parametrize("ratio", COMPRESS_RATIOS)
def test_every_route_and_chunk_leaves_the_same_bytes(npu: Executor, ratio: int) -> None:
    bench = npu.bench
    variants = [*routes(bench, ratio), *routes(bench, ratio, small=True), -1]
    found = npu.ask(make={"kind": "workload", "workload": [2, 10 * ratio, ratio]}, variants=variants)
    assert len(right(found["results"])) == 1
    assert found["results"][0]["outputs"] == 10


@pytest.mark.parametrize("tokens", [8192])
@pytest.mark.parametrize("ratio", COMPRESS_RATIOS)
def test_the_smallest_prefill(npu: Executor, ratio: int, tokens: int) -> None:
    found = npu.ask(
        make={"kind": "workload", "workload": [1, tokens, ratio]}, variants=routes(npu.bench, ratio)
    )
    assert len(right(found["results"])) == 1
    (first, *_) = found["results"]
    assert first["outputs"] == tokens // ratio
    assert tie_refusals(first["ties"], max(first["compared"], 10_000)) == ()


@pytest.mark.parametrize("outputs", [0, 1, 3, 8, 32])
@pytest.mark.parametrize("ratio", COMPRESS_RATIOS)
def test_decode_steps(npu: Executor, ratio: int, outputs: int) -> None:
    variants = [*routes(npu.bench, ratio), -1]
    found = npu.ask(make={"kind": "decode", "workload": [outputs, ratio]}, variants=variants)
    assert len(right(found["results"])) == 1
    assert found["results"][0]["outputs"] == outputs


@pytest.mark.parametrize("block_d", BLOCK_DIMS[1:])
def test_every_tile_leaves_the_same_bytes(npu: Executor, block_d: int) -> None:
    bench = npu.bench
    variants = [bench.variant(route, 128, layout, block_d) for route, layout in ROUTES]
    found = npu.ask(make={"kind": "decode", "workload": [5, 128]}, variants=[*variants, -1])
    assert len(right(found["results"])) == 1


def served(npu: Executor, make: dict[str, Any], ratio: int) -> list[dict[str, Any]]:
    """The results of the launcher's choice and of every route that takes these operands, in one chunk and in
    several."""
    bench = npu.bench
    variants = [-1, *routes(bench, ratio), *routes(bench, ratio, small=True)]
    found: list[dict[str, Any]] = npu.ask(make=make, variants=variants)["results"]
    taken = [result for result in found if result["refusal"] is None]
    for result in found:
        if result["refusal"] is not None:
            assert "is pinned, which is for ratio" in result["refusal"][1]
    # The general layout takes any call.
    assert found[3]["refusal"] is None and found[6]["refusal"] is None
    return taken


@pytest.mark.parametrize("name", ODD_CASES)
@pytest.mark.parametrize("ratio", COMPRESS_RATIOS)
def test_odd_cases(npu: Executor, name: str, ratio: int) -> None:
    results = served(npu, {"kind": "odd", "name": name, "compress_ratio": ratio}, ratio)
    digests = right(results)
    # Bytes that are not specified may differ between routes.
    assert len(digests) == 1 or "foreign" in name


@pytest.mark.parametrize("seed", range(12))
def test_random_cases(npu: Executor, seed: int) -> None:
    block_size = (8, 1, 3, 8, 16, 5)[seed % 6]
    make = {"kind": "random", "seed": seed, "compress_ratio": 128, "block_size": block_size}
    assert len(right(served(npu, make, 128))) == 1


@pytest.mark.parametrize("ratio", COMPRESS_RATIOS)
def test_fp32_weight_and_padded_pages(npu: Executor, ratio: int) -> None:
    make = {
        "kind": "workload", "workload": [1, 3 * ratio, ratio], "fp32_weight": True, "page_pad": 16,
        "kv_page_stride": 37376,
    }  # fmt: skip
    results = served(npu, make, ratio)
    assert len(right(results)) == 1
    # Pages with gaps are no rows for CANN's index_select, and an fp32 weight is not what aligned means.
    assert len(results) == 3


def test_rows_beyond_32_bits(npu: Executor) -> None:
    results = served(npu, {"kind": "far"}, 128)
    assert len(right(results)) == 1
    assert len(results) == 7


def test_calls_on_streams_of_their_own_share_no_memory(bench: Bench, tmp_path: Path) -> None:
    log = tmp_path / "log"
    running = Executor(bench, log, KVB_STANDIN_DEFER="1")
    variants = [*routes(bench, 128), *routes(bench, 128, small=True)]
    for _ in range(2):
        found = running.ask(make={"kind": "decode", "workload": [6, 128]}, variants=variants, together=True)
        assert len(right(found["results"])) == 1
    running.close()
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    memory = [call["memory"] for call in calls if call["call"] == "aclrtMalloc"]
    freed = [call for call in calls if call["call"] == "aclrtFree"]
    # Six streams at once; the second round finds what the first one left. index_select has memory of its own.
    assert len(memory) == len(set(memory)) == 8
    assert sorted(call["memory"] for call in freed) == sorted(memory)
    assert all(call["unharmed"] and not call["uses"] for call in freed)
