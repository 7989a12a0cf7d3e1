from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbuild.aot import elf, targets
from kvbuild.aot.launcher.vendors import VENDORS
from kvbuild.aot.pool import Compiled
from kvbuild.aot.targets import Parameter, Vendor, amd, cpu, nvidia
from kvbuild.kernels.gpgpu import route

VERSIONS = {"triton": "3.9.0", "ptxas": "12.9.86", "ptxas-blackwell": "13.4.59"}
EVERY = [(name, arch) for name in targets.names() for arch in targets.load(name).ARCHS]
GPGPU = [name for name in targets.names() if targets.load(name).ROUTE == "gpgpu"]
USER_ARGUMENTS = 4


def test_a_vendor_is_a_file() -> None:
    folder = Path(targets.__file__).parent
    assert targets.names() == tuple(sorted(path.stem for path in folder.glob("[a-z]*.py")))
    assert {"amd", "cpu", "hygon", "metax", "mthreads", "nvidia", "thead", "tianshu"} <= set(targets.names())


def test_a_launcher_exists_for_every_vendor_and_agrees_about_scratch() -> None:
    assert VENDORS.keys() >= set(GPGPU)
    for name in GPGPU:
        assert VENDORS[name].scratch is targets.load(name).SCRATCH, name


def test_nothing_else_names_a_vendor() -> None:
    """Adding a vendor touches its own file and its row among the vendors, nothing else in either package."""
    names = re.compile(rf"\b({'|'.join(name for name in GPGPU if name not in ('amd', 'nvidia'))})\b")
    root = Path(targets.__file__).parents[2]
    own = {root / "runtime" / "vendors.py", *(root / "aot" / "targets" / f"{name}.py" for name in GPGPU)}
    files = {
        path
        for folder in ("aot", "runtime")
        for path in (root / folder).rglob("*")
        if path.suffix in (".py", ".c", ".h")
    }
    assert own < files
    assert [str(path) for path in sorted(files - own) if names.search(path.read_text())] == []


@pytest.mark.parametrize("vendor", targets.names())
def test_every_vendor_has_what_the_protocol_lists(vendor: str) -> None:
    module = targets.load(vendor)
    for name in Vendor.__annotations__:
        assert hasattr(module, name), name
    for name, wanted in inspect.getmembers(Vendor, inspect.isfunction):
        if not name.startswith("_"):
            parameters = list(inspect.signature(wanted).parameters)[1:]
            assert list(inspect.signature(getattr(module, name)).parameters) == parameters, name


@pytest.mark.parametrize(("vendor", "arch"), EVERY)
def test_numbers_are_pinned_on_every_arch(vendor: str, arch: str) -> None:
    module = targets.load(vendor)
    assert module.numerics().keys() == {"fp_fusion", "denormals"}
    assert module.numerics()["fp_fusion"] is False
    if vendor in ("amd", "cpu", "hygon", "nvidia"):
        assert module.numerics()["denormals"] == "preserve"
    if module.ROUTE == "gpgpu":
        (form,) = route.kernels_for(128, "general", route.Tile(4, 512, 1, 8, 1))
        assert module.options(form)["enable_fp_fusion"] is False
        assert module.options(form)["num_warps"] == form.num_warps


@pytest.mark.parametrize(
    ("arch", "warp"), [("gfx90a", 64), ("gfx942", 64), ("gfx950", 64), ("gfx1100", 32), ("gfx1201", 32)]
)
def test_amd_warps(arch: str, warp: int) -> None:
    assert amd.warp_size(arch) == warp
    assert amd.triton_target(arch) == ("hip", arch, warp)
    assert amd.forms(arch) == ("block",)


def test_nvidia_clusters_begin_at_sm_90() -> None:
    without = [arch for arch in nvidia.ARCHS if "cluster" not in nvidia.forms(arch)]
    assert without == ["sm_80", "sm_86", "sm_89"]
    assert nvidia.triton_target("sm_100") == ("cuda", 100, 32)


@pytest.mark.parametrize(
    ("arch", "ptxas", "driver"),
    [
        ("sm_80", "12.9.86", 12000),
        ("sm_90", "12.9.86", 12000),
        ("sm_100", "13.4.59", 13000),
        ("sm_121", "13.4.59", 13000),
    ],
)
def test_the_oldest_driver_is_the_first_of_the_ptxas_major(arch: str, ptxas: str, driver: int) -> None:
    found = nvidia.toolchain(arch, VERSIONS)
    assert found == {"triton": "3.9.0", "ptxas": ptxas}
    assert nvidia.min_driver(found) == driver


def test_a_triton_with_one_ptxas_uses_it_everywhere() -> None:
    assert nvidia.toolchain("sm_100", {"triton": "3.5.1", "ptxas": "12.8.93"})["ptxas"] == "12.8.93"


def test_only_sm_90_names_the_first_ptxas() -> None:
    assert [arch for arch in nvidia.ARCHS if nvidia.environment(arch)] == ["sm_90"]


def test_the_cpu_target_has_no_device_side() -> None:
    assert (cpu.elf_machine("x86_64"), cpu.elf_machine("aarch64")) == (62, 183)
    assert cpu.warp_size("x86_64") == 0
    assert cpu.min_driver({}) == 0
    assert cpu.parameters(b"", "x") == ()
    assert cpu.resources(b"", "x") == {}


@pytest.mark.parametrize(
    "name", ["nvidia:sm_80", "nvidia:sm_90", "nvidia:sm_100", "amd:gfx942", "amd:gfx1100"]
)
def test_a_binary_says_its_machine_parameters_and_registers(
    name: str, compiled_tiny: dict[str, Compiled]
) -> None:
    compiled = compiled_tiny[name]
    vendor = targets.load(compiled.unit.vendor)
    entry = compiled.facts["entry"]
    assert elf.read(compiled.data).machine == vendor.elf_machine(compiled.unit.arch)
    found = vendor.parameters(compiled.data, entry)
    assert found[:USER_ARGUMENTS] == (Parameter(0, 8), Parameter(8, 8), Parameter(16, 4), Parameter(20, 4))
    assert all(parameter.size == 8 for parameter in found[USER_ARGUMENTS:])
    resources = vendor.resources(compiled.data, entry)
    assert 0 < resources["registers"] <= 512
    assert resources["spill_bytes"] == 0


@pytest.mark.parametrize("name", ["nvidia:sm_90", "amd:gfx942"])
@pytest.mark.parametrize("read", ["parameters", "resources"])
def test_a_damaged_binary_is_a_value_error(name: str, read: str, compiled_tiny: dict[str, Compiled]) -> None:
    compiled = compiled_tiny[name]
    function: Callable[[bytes, str], Any] = getattr(targets.load(compiled.unit.vendor), read)
    entry = compiled.facts["entry"]
    for damaged in (b"", b"not ELF", compiled.data[:50], compiled.data[: len(compiled.data) // 2]):
        with pytest.raises(ValueError):
            function(damaged, entry)


@pytest.mark.parametrize("name", ["nvidia:sm_90", "amd:gfx942"])
@pytest.mark.parametrize("read", ["parameters", "resources"])
def test_no_damage_is_anything_but_a_value_error(
    name: str, read: str, compiled_tiny: dict[str, Compiled]
) -> None:
    """Damage in what is read: headers, the section table, names, and the vendor's own section."""
    compiled, chance = compiled_tiny[name], random.Random(1)
    function: Callable[[bytes, str], Any] = getattr(targets.load(compiled.unit.vendor), read)
    data, entry = compiled.data, compiled.facts["entry"]
    table = int.from_bytes(data[40:48], "little")
    mark = data.find(b"amdhsa") if name.startswith("amd") else -1
    own = [data.find(elf.read(data).section(each).data) for each in (".nv.info", f".nv.info.{entry}")] if (
        mark < 0
    ) else [mark]  # fmt: skip
    outcomes = set()
    for _ in range(1500):
        broken = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            start = chance.choice((0, table, *own, *own, *own))
            at = min(start + chance.randrange(400), len(data) - 1)
            broken[at] = chance.choice((0, 1, 0x80, 0x91, 0xDD, 0xFF, chance.randrange(256)))
        try:
            function(bytes(broken), entry)
            outcomes.add("read")
        except ValueError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize("length", [0, 4, 7, 9, 12])
def test_a_cubin_attribute_of_another_size_is_a_value_error(
    length: int, compiled_tiny: dict[str, Compiled]
) -> None:
    compiled = compiled_tiny["nvidia:sm_90"]
    data, entry = bytearray(compiled.data), compiled.facts["entry"]
    start = compiled.data.find(elf.read(compiled.data).section(".nv.info").data)
    at = compiled.data.find(bytes((4, 0x2F, 8, 0)), start)
    assert at >= 0
    data[at + 2] = length
    with pytest.raises(ValueError):
        nvidia.resources(bytes(data), entry)


@pytest.mark.parametrize("name", ["nvidia:sm_90", "amd:gfx942"])
def test_an_unknown_kernel_name_is_a_value_error(name: str, compiled_tiny: dict[str, Compiled]) -> None:
    compiled = compiled_tiny[name]
    with pytest.raises(ValueError, match="other"):
        targets.load(compiled.unit.vendor).parameters(compiled.data, "other")
