"""Staged targets in the manifest: schema 2, what it allows and nothing else, and how they are selected."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvbuild.runtime.errors import BundleError, NoMatchingArtifact
from kvbuild.runtime.facts import Facts
from kvbuild.runtime.manifest import Manifest
from kvbuild.runtime.select import select
from kvbuild.runtime.staged import Staged
from kvbuild.runtime.strictjson import Node

NPU = Facts("ascend", "910B2", "Ascend910B2", 0, 0, "npu", "x86_64", "2.36")
FIELDS = ("stage", "kernels", "operators", "variants")


def argument(name: str, kind: str = "*fp32", intermediate: bool = True) -> dict[str, Any]:
    return {"name": name, "type": kind, "field": name, "intermediate": intermediate}


def kernel(name: str, blob: str, *buffers: str) -> dict[str, Any]:
    args = [argument("num_outputs", "i64", intermediate=False), *(argument(each) for each in buffers)]
    return {"name": name, "entry": name, "blob": blob, "args": args, "constexprs": {"RATIO": 128},
            "per_output": 1, "ub_bytes": 1768}  # fmt: skip


def variant(layout: str, route: str, *stages: str, limit: int | None = None) -> dict[str, Any]:
    buffers = [{"name": name, "dtype": "fp32", "shape": [128, 1024]} for name in ("rows", "gathered")]
    return {
        "ratio": 128, "layout": layout, "max_outputs": limit, "route": route, "block_d": 512,
        "chunk_bytes": 1 << 20, "chunk_outputs": 2, "stages": list(stages), "intermediates": buffers,
    }  # fmt: skip


def sealed(target: dict[str, Any]) -> dict[str, Any]:
    root = Node(copy.deepcopy(target), "")
    staged = Staged.read({name: Node(root.value[name], name, root) for name in FIELDS})  # type: ignore[index]
    return {**target, "launch_table": staged.digest}


@pytest.fixture
def value(samples: Any) -> dict[str, Any]:
    """A manifest with a staged target beside a cpu one."""
    blobs = samples.blobs(b"launcher of the cpu", b"launcher for ascend", b"HIVM of locate", b"HIVM of scan")
    cpu, npu, first, second = blobs
    target = {
        **samples.target("cpu", "x86_64", npu),
        "vendor": "ascend", "arch": "910B2", "route": "staged", "elf_machine": 0, "stage": "hivm",
        "kernels": [kernel("locate", first, "rows"), kernel("scan", second, "gathered")],
        "operators": [{"name": "gather", "function": "aclnnIndexSelect",
                       "args": [argument("rows"), argument("gathered")], "constants": {"dim": 0}}],
        "variants": [variant("dense", "index_select", "locate", "gather", "scan", limit=64),
                     variant("general", "block", "scan")],
    }  # fmt: skip
    both = [sealed(target), samples.target("cpu", "x86_64", cpu)]
    return {**samples.manifest(both, blobs), "schema": 2}


def refused(value: dict[str, Any]) -> str:
    with pytest.raises(BundleError) as error:
        Manifest.from_json(value)
    return str(error.value)


def test_it_survives_both_ways(value: dict[str, Any]) -> None:
    manifest = Manifest.from_json(value)
    assert manifest.schema == 2 and manifest.to_json() == value
    assert Manifest.from_bytes(manifest.canonical_bytes()) == manifest
    target = manifest.targets[0]
    assert [each.name for each in target.launchable] == ["c128-dense-64", "c128-general-any"]
    assert set(target.kernel_blobs) == {"locate", "scan"} and target.kernels == () and target.variants == ()
    assert target.blobs == set(target.kernel_blobs.values()) | set(target.launchers.values())


def test_a_manifest_says_the_oldest_schema_that_holds_it(value: dict[str, Any], samples: Any) -> None:
    assert "schema: wanted 2" in refused({**value, "schema": 1})
    plain, _ = samples.mixed()
    assert Manifest.from_json(plain).schema == 1
    assert "schema: wanted 1" in refused({**plain, "schema": 2})


def test_launchers_stay_valid_when_the_kernels_are_finished(value: dict[str, Any], samples: Any) -> None:
    finished = copy.deepcopy(value)
    (blob,) = samples.blobs(b"\x7fELF of locate")
    target = finished["targets"][0]
    finished["blobs"] = {**{k: v for k, v in value["blobs"].items() if k != target["kernels"][0]["blob"]},
                         blob: 14}  # fmt: skip
    target["kernels"][0]["blob"] = blob
    target |= {"stage": "device", "elf_machine": 4660}
    read = Manifest.from_json(finished).targets[0]
    assert read.launch_table == value["targets"][0]["launch_table"]
    target["kernels"][0]["ub_bytes"] = 1
    assert "targets[0].launch_table: wanted" in refused(finished)


def _walk(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, child in items for path in ((*here, key), *_walk(child, (*here, key)))]


def test_every_field_is_required_and_none_is_free(value: dict[str, Any]) -> None:
    own = [path for path in _walk(value["targets"][0]) if path[0] in FIELDS]
    named = [path for path in own if isinstance(path[-1], str) and path[-2:-1] not in
             (("constexprs",), ("constants",))]  # fmt: skip
    assert len(named) > 60
    for path in named:
        broken = copy.deepcopy(value)
        at = broken["targets"][0]
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]
        assert "no such field" in refused(broken)
        at[path[-1]] = [object()]
        assert "wanted" in refused(broken)
        if path[:-1]:
            at["surprise"] = 1
            assert "wanted" in refused(broken)


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "stage of no build": (lambda t: t.update(stage="ptx"), 'wanted "hivm" or "device"'),
    "unknown stage": (lambda t: t["variants"][0]["stages"].append("x"), "stages that the target lists"),
    "no stages": (lambda t: t["variants"][1].update(stages=[]), "one stage or more"),
    "no variants": (lambda t: t.update(variants=[]), "one variant or more"),
    "a name twice": (lambda t: t["operators"][0].update(name="scan"), "each stage's name once"),
    "unknown buffer": (lambda t: t["variants"][1].update(intermediates=[]), "for scan uses it"),
    "buffer twice": (
        lambda t: t["variants"][1].update(intermediates=2 * t["variants"][1]["intermediates"][:1]),
        "each name once",
    ),
    "gaps for a gather": (lambda t: t["variants"][0].update(layout="general"), "dense for index_select"),
    "last is bounded": (lambda t: t["variants"][1].update(max_outputs=5), "the last variant of ratio 128"),
    "buffer by value": (lambda t: t["kernels"][0]["args"][1].update(type="i64"), "passed by its address"),
    "unknown type": (lambda t: t["kernels"][0]["args"][0].update(type="i128"), "wanted a pointer or one of"),
    "empty chunk": (lambda t: t["variants"][0].update(chunk_outputs=0), "wanted an integer >= 1"),
    "cpu route": (lambda t: t.update(route="gpgpu"), "no field but"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_together_is_refused(value: dict[str, Any], fault: str) -> None:
    change, words = FAULTS[fault]
    change(value["targets"][0])
    assert words in refused(value)


def test_an_unfinished_target_is_refused_with_how_to_finish_it(value: dict[str, Any]) -> None:
    manifest = Manifest.from_json(value)
    with pytest.raises(NoMatchingArtifact) as error:
        select(manifest, NPU)
    said = str(error.value)
    assert "ascend:910B2: it is compiled as far as HIVM, not to the end: run `kvbuild finish BUNDLE`" in said
    assert said.count("CANN 8.5 or newer") == 2
    finished = copy.deepcopy(value)
    finished["targets"][0]["stage"] = "device"
    assert select(Manifest.from_json(finished), NPU).target.arch == "910B2"


def test_another_npu_is_told_what_the_bundle_is_for(value: dict[str, Any]) -> None:
    with pytest.raises(NoMatchingArtifact, match="it is for 910B2 and no other arch") as error:
        select(Manifest.from_json(value), replace(NPU, arch="910B4"))
    assert "kvbuild compile --target ascend:910B4" in str(error.value)
