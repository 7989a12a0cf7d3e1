"""Whose device it is, as a table: marks in, a vendor with its reasons out; and what each may load."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbuild.aot import targets
from kvbuild.aot.launcher.vendors import VENDORS as DRIVERS
from kvbuild.runtime.errors import NoMatchingArtifact
from kvbuild.runtime.facts import Facts
from kvbuild.runtime.identity import Marks, identify
from kvbuild.runtime.manifest import Manifest
from kvbuild.runtime.select import Accepted, evaluate, select
from kvbuild.runtime.vendors import VENDORS, torch_type

HIP = ("version.hip",)
# One device of each vendor as torch and its driver show it, and a target that is for it.
DEVICES = {
    "nvidia": (Marks("cuda", "NVIDIA A100-SXM4-80GB", "8.0", pci="10de"), "sm_80"),
    "amd": (Marks("hip", "AMD Instinct MI50", "", "gfx906:sramecc+:xnack-", "1002", HIP), "gfx906"),
    "hygon": (Marks("hip", "Z100", "", "gfx906:xnack-", "1d94", HIP, ("libgalaxyhip.so",)), "gfx906"),
    "metax": (
        Marks("cuda", "MetaX C500", "8.0", torch=("version.maca",), libraries=("libmcruntime.so",)),
        "c500",
    ),
    "tianshu": (
        Marks("cuda", "Iluvatar BI-V150", "7.1", torch=("corex",), libraries=("libixthunk.so", "libixml.so")),
        "ivcore11",
    ),
    "mthreads": (Marks("musa", "MTT S4000", "2.2", libraries=("libmusa.so",)), "mp_22"),
    "thead": (
        Marks("cuda", "PPU-ZW810E", "8.0", torch=("__version__=ppu",), libraries=("libhggc.so",)),
        "ppu001",
    ),
    "ascend": (Marks("npu", "Ascend910B2", "", "Ascend910B2", libraries=("libascendcl.so",)), "910B2"),
}  # fmt: skip
HOST = {"index": 0, "driver": 13000, "driver_library": "", "host": "x86_64", "libc": "2.35"}


def facts_of(vendor: str, **changes: Any) -> Facts:
    marks = replace(DEVICES[vendor][0], **changes)
    return Facts.from_json({**HOST, "name": marks.name, "marks": marks.to_json()})


def merged(samples: Any, *vendors: str) -> Manifest:
    blobs = samples.blobs(b"launcher", b"binary")
    launcher, binary = blobs
    hosts = {"x86_64-linux-gnu.2.17": launcher}
    made = [
        samples.target(vendor, DEVICES[vendor][1], launcher, binary, launchers=hosts) for vendor in vendors
    ]
    return Manifest.from_json(samples.manifest(made, blobs))


def test_every_vendor_stands_in_every_table() -> None:
    accelerators = set(VENDORS)
    assert accelerators == set(DEVICES)
    assert {vendor for vendor in targets.names() if targets.load(vendor).ROUTE != "cpu"} <= accelerators
    assert set(DRIVERS) - {"cpu"} == accelerators


@pytest.mark.parametrize("soc", ["910B2", "910B2C", "910B4-1", "910_9392", "910B", "310P3"])
def test_an_ascend_soc_is_its_name_without_the_prefix_wherever_that_stands(soc: str) -> None:
    for marks in (
        Marks("npu", f"Ascend{soc}", code=f"Ascend{soc}"),
        Marks("npu", code=f"Ascend{soc}"),
        Marks("npu", f"Ascend{soc}"),
    ):
        assert (identify(marks).vendor, identify(marks).arch) == ("ascend", soc)


def test_the_archs_that_advice_names_are_those_that_can_be_built() -> None:
    for vendor, row in VENDORS.items():
        known = targets.load(vendor).ARCHS if vendor in targets.names() else ()
        assert row.devices.built == tuple(known), vendor


def test_every_arch_that_is_built_is_some_devices() -> None:
    for vendor in set(targets.names()) & set(VENDORS) - {"amd"}:
        assert DEVICES[vendor][1] in targets.load(vendor).ARCHS
        assert set((VENDORS[vendor].devices.archs or {}).values()) <= set(targets.load(vendor).ARCHS), vendor


NAMES = re.compile(
    r"hygon|metax|maca|tianshu|iluvatar|corex|mthreads|moore|musa|thead|t-head|\bppu\b|hggc|\bdtk\b",
    re.IGNORECASE,
)


def spoken_of(path: Path) -> set[str]:
    """The vendors' words in the code of a file, its comments and docstrings left out."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return set(NAMES.findall(re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)))
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
    words = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    words -= {each for each in docs if each}
    words |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    words |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {found for word in words for found in NAMES.findall(word)}


def test_a_vendor_is_known_in_two_places_and_nowhere_else() -> None:
    """Those that came with a target file and a row. (NVIDIA's, AMD's and Ascend's launchers have sources.)"""
    root = Path(__file__).resolve().parents[2]
    files = [path for package in ("aot", "runtime", "kernels") for path in (root / package).rglob("*")]
    elsewhere = {
        str(path.relative_to(root)): sorted(found)
        for path in files
        if path.suffix in (".py", ".c", ".h")
        and path.parent.name != "targets"
        and path != root / "runtime" / "vendors.py"
        and (found := spoken_of(path))
    }
    assert elsewhere == {}
    assert spoken_of(root / "aot" / "targets" / "metax.py") and spoken_of(root / "runtime" / "vendors.py")


@pytest.mark.parametrize("vendor", DEVICES)
def test_a_devices_own_vendor_is_told_and_why(vendor: str) -> None:
    marks, arch = DEVICES[vendor]
    found = identify(marks)
    assert (found.vendor, found.arch.split(":")[0]) == (vendor, arch)
    assert f"its name is {marks.name}" in found.reasons


@pytest.mark.parametrize(("device", "target"), list(itertools.product(DEVICES, DEVICES)))
def test_each_vendors_device_takes_its_own_code_alone(samples: Any, device: str, target: str) -> None:
    facts = facts_of(device)
    (verdict,) = evaluate(merged(samples, target), facts)
    assert isinstance(verdict, Accepted) is (device == target)
    if device != target:
        assert f"its vendor is {target}, this device's is {device} (" in verdict.reason
        assert DEVICES[device][0].name in verdict.reason


@pytest.mark.parametrize("device", DEVICES)
def test_of_a_merged_bundle_each_gets_its_own(samples: Any, device: str) -> None:
    whole = merged(samples, *DEVICES)
    assert select(whole, facts_of(device)).target.vendor == device
    others = merged(samples, *(vendor for vendor in DEVICES if vendor != device))
    arch = DEVICES[device][1]
    built = arch in VENDORS[device].devices.built
    known = f"kvbuild has no target for {device}:{arch}; it"
    advice = f"compile --target {device}:{arch}" if built else known
    with pytest.raises(NoMatchingArtifact, match=advice):
        select(others, facts_of(device))


def test_a_capability_of_nvidias_runs_no_nvidia_code(samples: Any) -> None:
    for vendor in ("thead", "metax"):
        with pytest.raises(NoMatchingArtifact, match="whose compute capability 8.0 is not nvidia's"):
            select(merged(samples, "nvidia"), facts_of(vendor))


def test_corex_code_is_refused_on_nvidia_and_the_other_way_round(samples: Any) -> None:
    with pytest.raises(
        NoMatchingArtifact, match="its vendor is tianshu, this device's is nvidia .its PCI vendor is"
    ):
        select(merged(samples, "tianshu"), facts_of("nvidia", capability="7.1"))
    with pytest.raises(
        NoMatchingArtifact, match="its vendor is nvidia, this device's is tianshu .its name is Iluv"
    ):
        select(merged(samples, "nvidia"), facts_of("tianshu", capability="8.0"))


SPARSE = [
    # One mark at a time decides; nothing falls to NVIDIA or AMD unless nothing speaks.
    *((Marks("cuda", f"{name} 1"), "nvidia") for name in ("NVIDIA", "Tesla", "GeForce", "Quadro", "TITAN")),
    (Marks("cuda", "GRID A100-10C"), "nvidia"),
    (Marks("cuda", "Graphics Device"), "nvidia"),
    (Marks("cuda", "A30", pci="10de"), "nvidia"),
    (Marks("cuda", pci="10de"), "nvidia"),
    (Marks("cuda", "PPU-ZW810"), "thead"),
    (Marks("cuda", torch=("__version__=ppu",)), "thead"),
    (Marks("cuda", libraries=("libhggc.so",)), "thead"),
    (Marks("cuda", "Iluvatar MR-V100"), "tianshu"),
    (Marks("cuda", "MR-V100"), "tianshu"),
    (Marks("cuda", torch=("corex",)), "tianshu"),
    (Marks("cuda", libraries=("libixthunk.so",)), "tianshu"),
    (Marks("cuda", torch=("version.maca",)), "metax"),
    (Marks("cuda", libraries=("libmcruntime.so",)), "metax"),
    (Marks("maca"), "metax"),
    (Marks("hggc"), "thead"),
    (Marks("musa"), "mthreads"),
    (Marks("npu"), "ascend"),
    (Marks("hip", code="gfx906"), "amd"),
    (Marks("hip", code="gfx942"), "amd"),
    (Marks("hip", code="gfx936"), "hygon"),
    (Marks("hip", code="gfx906", pci="1d94"), "hygon"),
    (Marks("hip", code="gfx906", libraries=("libgalaxyhip.so",)), "hygon"),
    (Marks("hip", code="gfx906", pci="1002", libraries=("libgalaxyhip.so",)), "amd"),
    (Marks("cuda", "NVIDIA H20", libraries=("libhggc.so", "libmcruntime.so")), "nvidia"),
    (Marks("cuda", "NVIDIA H20", libraries=("libmusa.so", "libascendcl.so")), "nvidia"),
]


@pytest.mark.parametrize(("marks", "vendor"), SPARSE)
def test_one_mark_decides(marks: Marks, vendor: str) -> None:
    found = identify(marks)
    assert found.vendor == vendor and found.arch and found.reasons


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        (
            Marks("cuda", "PPU-ZW810E", pci="10de"),
            "of more than one vendor; nvidia: its PCI vendor is 10de; thead:",
        ),
        (Marks("cuda", "NVIDIA H200", torch=("corex",)), "tianshu: torch bears the mark corex"),
        (Marks("cuda", "MTT S4000"), "its name is MTT S4000; but it answers as cuda, mthreads's as musa"),
        (
            Marks("cuda", "Chip One", pci="abcd"),
            "its PCI vendor is abcd and its name 'Chip One', which no vendor",
        ),
        (
            Marks("cuda", libraries=("libhggc.so", "libmcruntime.so")),
            "more than one vendor: metax's libmcruntime",
        ),
        (Marks("cuda", "Biren BR100", "9.0"), "its name is 'Biren BR100' and its PCI vendor cannot be read"),
        (Marks("cuda", "", "9.0", libraries=("libmusa.so",)), "it shows no name, and its PCI vendor cannot"),
        (Marks("hip", "AMD Instinct", code="gfx936"), "hygon: its code is gfx936"),
    ],
)
def test_marks_that_contradict_each_other_name_nobody(marks: Marks, words: str) -> None:
    found = identify(marks)
    assert (found.vendor, found.arch) == ("", "")
    assert words in "; ".join(found.reasons)
    with pytest.raises(ValueError, match="^marks: wanted marks of one vendor"):
        Facts.from_json({**HOST, "name": "x", "marks": marks.to_json()})


def test_an_arch_that_no_rule_knows_is_no_targets(samples: Any) -> None:
    facts = facts_of("metax", name="MetaX X1", capability="9.9")
    assert facts.arch == "capability-9.9"
    (verdict,) = evaluate(merged(samples, "metax"), facts)
    assert "it is for c500 and no other arch, this device is capability-9.9" in verdict.reason
    assert facts_of("metax", name="MetaX X1", capability="").arch == "unknown"


def test_torch_has_three_names_for_them() -> None:
    named = {vendor: torch_type(vendor) for vendor in VENDORS}
    assert {vendor for vendor, kind in named.items() if kind != "cuda"} == {"mthreads", "ascend"}
    assert (named["mthreads"], named["ascend"]) == ("musa", "npu")


def test_explain_answers_for_hosts_one_does_not_have(
    samples: Any, kvbuild: Callable[..., Any], tmp_path: Path
) -> None:
    """Bundles built apart, merged by the command, and a facts file of marks alone for each vendor."""
    parts = []
    for vendor in DEVICES:
        one = merged(samples, vendor)
        parts.append(
            samples.write(tmp_path / f"{vendor}.kvb", one.to_json(), samples.blobs(b"launcher", b"binary"))
        )
    assert kvbuild("merge", *parts, "-o", tmp_path / "all.kvb").code == 0
    for vendor, (marks, arch) in DEVICES.items():
        path = tmp_path / f"{vendor}.json"
        path.write_text(json.dumps({**HOST, "name": marks.name, "marks": marks.to_json()}))
        done = kvbuild("explain", tmp_path / "all.kvb", "--facts", path, "--json")
        assert done.code == 0 and json.loads(done.out)["chosen"] == f"{vendor}:{arch}"
        others = [name for name in DEVICES if name != vendor]
        refused = kvbuild("explain", tmp_path / f"{others[0]}.kvb", "--facts", path)
        assert refused.code == 1 and f"its vendor is {others[0]}, this device's is {vendor}" in refused.out
