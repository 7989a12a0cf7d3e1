"""The targets whose compilers are not here: facts, and what is checked of made-up binaries of theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import binaries
import pytest

from kvbuild.aot import plan as planning
from kvbuild.aot import spec, targets, tuning
from kvbuild.aot.assemble import check, natural_offsets
from kvbuild.aot.build import read_source
from kvbuild.aot.pool import Compiled
from kvbuild.aot.spec import TargetName
from kvbuild.aot.targets import Parameter, hygon, metax, mthreads, thead, tianshu
from kvbuild.kernels.gpgpu import route
from kvbuild.kernels.gpgpu.route import Tile

VENDORS = ("hygon", "metax", "mthreads", "thead", "tianshu")
EVERY = [(vendor, arch) for vendor in VENDORS for arch in targets.load(vendor).ARCHS]
SIGNATURE = (("x", "*fp32"), ("n", "i64"), ("count", "i32"), ("scale", "fp32"))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("hygon:gfx906", ("hip", "gfx906", 64)), ("hygon:gfx936", ("hip", "gfx936", 64)),
        ("metax:c500", ("maca", 80, 64)), ("metax:c600", ("maca", 86, 64)),
        ("mthreads:mp_21", ("musa", 21, 128)), ("mthreads:mp_22", ("musa", 22, 128)),
        ("mthreads:mp_31", ("musa", 31, 32)), ("thead:ppu001", ("cuda", 80, 32)),
        ("thead:ppu0015", ("cuda", 89, 32)), ("tianshu:ivcore10", ("cuda", 70, 64)),
        ("tianshu:ivcore11", ("cuda", 71, 64)), ("tianshu:ivcore20", ("cuda", 80, 64)),
    ],
)  # fmt: skip
def test_what_triton_is_asked_for(name: str, target: tuple[str, int | str, int]) -> None:
    vendor, _, arch = name.partition(":")
    assert targets.load(vendor).triton_target(arch) == target
    assert targets.load(vendor).warp_size(arch) == target[2]


@pytest.mark.parametrize(("vendor", "arch"), EVERY)
def test_a_table_is_the_archs_own_and_claims_no_measurement(vendor: str, arch: str) -> None:
    table = tuning.load(vendor, arch)
    assert table.measured is False
    assert "timed" in table.source
    for rows in table.rows.values():
        for row in rows:
            assert targets.load(vendor).SCRATCH or not route.scratch_per_output(row.tile)


def tiles(vendor: str, arch: str) -> dict[int, list[Tile]]:
    return {ratio: [row.tile for row in rows] for ratio, rows in tuning.load(vendor, arch).rows.items()}


def test_tiles_are_what_public_experience_says() -> None:
    direct = [Tile(4, 64, 1, 1, 1)]
    assert tiles("metax", "c500") == {128: direct, 256: direct, 512: direct}
    # 256 of 512 rows a program: the nearest to a tile of 256 rows.
    assert tiles("hygon", "gfx936") == {128: direct, 256: direct, 512: [Tile(4, 64, 2, 1, 1)]}
    for vendor, arch in (("tianshu", "ivcore11"), ("mthreads", "mp_22"), ("mthreads", "mp_31")):
        for rows in tiles(vendor, arch).values():
            assert [(tile.block_d, tile.split, tile.num_stages) for tile in rows] == [(512, 1, 1)]


@pytest.mark.parametrize("vendor", VENDORS)
def test_no_kernel_of_theirs_has_a_cache_hint(vendor: str) -> None:
    """Which kernels have: those of the forms that these archs are not offered."""
    hints = ("eviction_policy", "cache_modifier")
    for arch in targets.load(vendor).ARCHS:
        assert targets.load(vendor).forms(arch) == ("block",)
    for source in route.SOURCES[:3]:
        assert not any(hint in read_source(f"gpgpu/{source}") for hint in hints)
    assert "eviction_policy" in read_source("gpgpu/stream.py"), "so that a hint would be seen"


@pytest.mark.parametrize(("vendor", "arch"), EVERY)
def test_what_an_arch_needs_is_looked_for_and_recorded(vendor: str, arch: str) -> None:
    module = targets.load(vendor)
    needs = module.needs(arch)
    assert set(needs) - {"triton"} <= module.LOOKUP.keys()
    assert needs == (("triton",) if arch == "gfx906" else module.TOOLS)
    found = module.toolchain(arch, dict.fromkeys(module.TOOLS, "1.0"))
    assert found.keys() == {*needs, "evidence"}
    assert "load" in found["evidence"], "what nobody has tried is said"


def test_gfx906_is_built_by_name_and_apart_from_amds(tiny: Any) -> None:
    """The one of them that Triton's own AMD backend builds."""
    ours, theirs = tiny.unit("hygon:gfx906"), tiny.unit("amd:gfx942")
    (compiled,) = tiny.compile(ours)
    assert isinstance(compiled, Compiled), compiled
    artifact = check(compiled)
    assert (artifact.machine, artifact.hidden, artifact.derived) == (224, 2, False)
    assert hygon.resources(artifact.data, artifact.entry)["registers"] > 0
    assert dict(ours.toolchain)["evidence"] == "built by name with Triton's AMD backend; not loaded on DTK"
    assert "evidence" not in dict(theirs.toolchain)
    assert replace(ours, vendor="amd").key != ours.key


def made(vendor: str, arch: str, triton: str = "3.6.0", **changes: Any) -> Compiled:
    """A unit of that vendor, as if its compiler had answered."""
    module = targets.load(vendor)
    unit = planning.Unit(
        vendor=vendor, arch=arch, triton_target=module.triton_target(arch), module="m.py", function="add",
        sources=(), signature=SIGNATURE, constexprs=(), divisible_by_16=(), options=(("num_ctas", 1),),
        environment=(), binary=module.BINARY,
        toolchain=tuple({**dict.fromkeys(module.TOOLS, "1.0"), "triton": triton}.items()), recipe="r",
    )  # fmt: skip
    told: dict[str, Any] = {
        "entry": "add", "shared": 0, "num_warps": 4, "num_ctas": 1, "global_scratch": 0, "profile_scratch": 0,
    }  # fmt: skip
    data = changes.pop("data", None) or binaries.made_up(vendor, "add", SIGNATURE, 2)
    return Compiled(unit, data, {**told, **changes}, 0.0)


@pytest.mark.parametrize("vendor", ["mthreads", "thead", "tianshu"])
@pytest.mark.parametrize(
    ("triton", "hidden"),
    [("3.0.0", 0), ("3.1.0+fork", 0), ("3.2", 0), ("3.3.1", 1), ("3.4", 1), ("3.5.1", 2), ("3.6.0+x", 2)],
)
def test_what_a_binary_does_not_tell_is_derived(vendor: str, triton: str, hidden: int) -> None:
    artifact = check(made(vendor, targets.load(vendor).ARCHS[-1], triton))
    assert (artifact.hidden, artifact.derived) == (hidden, True)
    assert artifact.offsets == natural_offsets(tuple(kind for _, kind in SIGNATURE))


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted a Triton version such as 3.6.0, found 'fork'"):
        check(made("tianshu", "ivcore11", "fork"))


@pytest.mark.parametrize("vendor", ["tianshu", "thead"])
@pytest.mark.parametrize(
    ("machine", "whose"),
    [(190, "NVIDIA CUDA"), (224, "AMD GPU"), (62, "x86-64"), (183, "AArch64"), (0, "none")],
)
def test_a_registered_machine_is_anothers(vendor: str, machine: int, whose: str) -> None:
    data = binaries.elf(machine, {".strtab": b"\0add\0", ".hg_info.add": b""})
    text = f"wanted an ELF machine that is {vendor}'s own, found {machine}, which means {whose}"
    with pytest.raises(ValueError, match=text):
        check(made(vendor, targets.load(vendor).ARCHS[0], data=data))


def test_the_machine_of_what_was_built_is_recorded() -> None:
    assert check(made("tianshu", "ivcore11")).machine == binaries.MACHINES["tianshu"]
    assert check(made("thead", "ppu001")).machine == binaries.MACHINES["thead"]


NATIVE = "maca-mxc-metax-macahca--xcore1000"


def test_of_an_mcfatbin_the_native_member_ships() -> None:
    whole = binaries.made_up("metax", "add", SIGNATURE, 2)
    native = metax.device_code(whole, "c500")
    assert native.startswith(b"\x7fELF") and whole.endswith(native)
    artifact = check(made("metax", "c500", data=whole))
    assert (artifact.data, artifact.machine, artifact.hidden, artifact.derived) == (native, 253, 2, False)
    first = metax.parameters(native, "add")[:4]
    assert first == (Parameter(0, 8), Parameter(8, 8), Parameter(16, 4), Parameter(20, 4))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (binaries.bundle({f"{NATIVE}-bc": b"bc"}), f"found 0 among {NATIVE}-bc"),
        (binaries.bundle({NATIVE: b"1", "maca-mxc-metax-macahca--xcore1002": b"2"}), "found 2 among"),
        (binaries.bundle({"maca-mxc-metax-macahca--xcore1500": b"of c600"}), "found 0 among"),
        (binaries.bundle({}), "found 0 among none"),
        (binaries.elf(253, {}), "wanted an offload bundle"),
        (binaries.bundle({NATIVE: binaries.elf(253, {})}), "no MetaX metadata note"),
        (binaries.bundle({NATIVE: binaries.elf(62, {})}), "wanted ELF machine 253, found 62"),
    ],
)
def test_an_mcfatbin_without_its_chips_code_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check(made("metax", "c500", data=data))


def test_two_vendors_share_a_machine_and_are_told_apart_all_the_same() -> None:
    native = metax.device_code(binaries.made_up("metax", "add", SIGNATURE, 2), "c500")
    assert metax.elf_machine("c500") == mthreads.elf_machine("mp_31")
    with pytest.raises(ValueError, match="wanted a mubin, found an ELF file with notes of MetaX"):
        check(made("mthreads", "mp_31", data=native))
    with pytest.raises(ValueError, match="wanted an offload bundle"):
        check(made("metax", "c500", data=binaries.made_up("mthreads", "add", SIGNATURE, 2)))


@pytest.mark.parametrize(
    ("vendor", "text"),
    [
        ("thead", "ELF section .hg_info.add is missing"), ("tianshu", "the binary has no symbol add"),
        ("mthreads", "the binary has no symbol add"), ("metax", "names no kernel add"),
        ("hygon", "names no kernel add"),
    ],
)  # fmt: skip
def test_a_binary_without_the_kernel_is_refused(vendor: str, text: str) -> None:
    other = binaries.made_up(vendor, "added", SIGNATURE, 2)
    with pytest.raises(ValueError, match=text):
        check(made(vendor, targets.load(vendor).ARCHS[0], data=other))


@pytest.mark.parametrize("module", [metax, mthreads, thead, tianshu])
def test_what_a_kernel_uses_is_not_public(module: Any) -> None:
    with pytest.raises(ValueError, match="not public"):
        module.resources(b"", "add")


@pytest.mark.parametrize(("vendor", "arch"), EVERY)
def test_more_shared_memory_than_a_block_has_is_refused(vendor: str, arch: str) -> None:
    most = targets.load(vendor).shared_memory(arch)
    if vendor != "metax" or arch == "c500":
        assert check(made(vendor, arch, shared=most)).shared == most
        with pytest.raises(ValueError, match=f"wanted at most {most} bytes of shared memory a block, found"):
            check(made(vendor, arch, shared=most + 1))


def planned(name: str, tune_space: bool, read: Callable[[str], str] = str) -> planning.PlannedTarget:
    vendor, _, arch = name.partition(":")
    given = planning.Facts(
        tables={TargetName(vendor, arch): tuning.load(vendor, arch)},
        versions={vendor: {**dict.fromkeys(targets.load(vendor).TOOLS, "1.0"), "triton": "3.1.0"}},
        commands={}, zig="0.17", cpu_sources=(), read=read, recipe="r",
    )  # fmt: skip
    names = [TargetName(vendor, arch)]
    return planning.plan(spec.load(spec.PACKAGED), names, given, tune_space=tune_space).targets[0]


@pytest.mark.parametrize(
    ("name", "any_scratch"), [("mthreads:mp_31", False), ("tianshu:ivcore11", False), ("metax:c500", True)]
)
def test_the_tuning_space_holds_what_can_be_launched(name: str, any_scratch: bool) -> None:
    aligned = [v for v in planned(name, tune_space=True).variants if v.layout == "aligned"]
    assert len(aligned) >= 18
    assert any(variant.scratch_per_output for variant in aligned) is any_scratch


def test_build_yaml_overrides_one_vendor_alone() -> None:
    before = {name: planned(name, tune_space=False) for name in ("metax:c500", "hygon:gfx936")}
    own = {"c500": (tuning.Row(None, Tile(4, 512, 1, 8, 1)),)}
    given = spec.load(spec.PACKAGED)
    section = replace(given.targets["metax"], tiles=own)
    changed = replace(given, targets={**given.targets, "metax": section})
    facts = planning.Facts(
        tables={
            TargetName("metax", "c500"): tuning.load("metax", "c500"),
            TargetName("hygon", "gfx936"): tuning.load("hygon", "gfx936"),
        },
        versions={
            vendor: {**dict.fromkeys(targets.load(vendor).TOOLS, "1.0"), "triton": "3.1.0"}
            for vendor in ("metax", "hygon")
        },
        commands={}, zig="0.17", cpu_sources=(), read=str, recipe="r",
    )  # fmt: skip
    after = {str(t.name): t for t in planning.plan(changed, list(facts.tables), facts).targets}
    assert after["hygon:gfx936"] == before["hygon:gfx936"]
    assert {kernel.tile for kernel in after["metax:c500"].kernels} == {Tile(4, 512, 1, 8, 1)}
