from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

import pytest

from kvbuild.aot import plan as planning
from kvbuild.aot import spec, targets, tuning
from kvbuild.aot.plan import Facts, Plan, Unit
from kvbuild.aot.spec import TargetName
from kvbuild.kernels.gpgpu import route, space
from kvbuild.kernels.gpgpu.route import Tile

STREAM = Tile(8, 512, 1, 4, 2)
CLUSTER = Tile(4, 64, 1, 4, 1, True)
SCAN = Tile(4, 64, 1, 4, 1)
FUSED = Tile(4, 512, 1, 8, 1)
VERSIONS = {"triton": "3.9.0", "ptxas": "12.9.86", "ptxas-blackwell": "13.4.59"}
SPEC = spec.load(spec.PACKAGED)


def table(*rows: tuple[int | None, Tile]) -> tuning.Table:
    made = tuple(tuning.Row(limit, tile) for limit, tile in rows)
    return tuning.Table("", False, "", dict.fromkeys((128, 256, 512), made))


def facts(tables: Mapping[str, tuning.Table], **changes: object) -> Facts:
    default = Facts(
        tables={TargetName(*name.split(":")): each for name, each in tables.items()},
        versions={"nvidia": VERSIONS, "amd": VERSIONS, "cpu": {"zig": "0.17"}},
        commands={"nvidia": ("python",), "amd": ("python",), "cpu": ("python",)},
        zig="0.17",
        cpu_sources=("cpu/a.c", "cpu/b.h"),
        read=lambda path: f"text of {path}",
        recipe="r",
    )
    return replace(default, **changes)  # type: ignore[arg-type]


def plan(*names: str, rows: tuning.Table | None = None, given: spec.Spec = SPEC, **changes: object) -> Plan:
    tables = dict.fromkeys(names, rows or table((None, FUSED)))
    return planning.plan(given, [TargetName(*name.split(":")) for name in names], facts(tables, **changes))


def test_variants_of_both_layouts_take_every_row() -> None:
    (target,) = plan("nvidia:sm_80", rows=table((64, SCAN), (None, FUSED))).targets
    of_128 = [variant for variant in target.variants if variant.ratio == 128]
    assert [(v.layout, v.max_outputs, len(v.kernels)) for v in of_128] == [
        ("aligned", 64, 2),
        ("aligned", None, 1),
        ("general", 64, 2),
        ("general", None, 1),
    ]
    assert [v.scratch_per_output for v in of_128] == [6144, 0, 6144, 0]
    kernels = {kernel.name: kernel for kernel in target.kernels}
    first, last = (kernels[name] for name in of_128[0].kernels)
    assert (first.unit.function, last.unit.function) == ("compress_scan", "compress_finalize")
    assert kernels[of_128[3].kernels[0]].tile == FUSED


def test_general_rows_that_come_to_one_tile_are_one_variant() -> None:
    rows = table((8, CLUSTER), (16, replace(CLUSTER, num_stages=2)), (64, STREAM), (None, FUSED))
    (target,) = plan("nvidia:sm_90", rows=rows).targets
    of_128 = [v for v in target.variants if v.ratio == 128 and v.layout == "general"]
    assert [(v.max_outputs, len(v.kernels), v.scratch_per_output) for v in of_128] == [
        (16, 2, 8 * 6144),
        (64, 1, 0),
        (None, 1, 0),
    ]


def test_the_order_of_ratios_and_variants_is_the_launchers() -> None:
    (target,) = plan("nvidia:sm_80").targets
    assert [(v.ratio, v.layout) for v in target.variants] == [
        (ratio, layout) for ratio in (128, 256, 512) for layout in ("aligned", "general")
    ]


def test_names_are_unique_and_say_what_the_kernel_is() -> None:
    (target,) = plan("nvidia:sm_90", rows=table((None, CLUSTER))).targets
    names = [kernel.name for kernel in target.kernels]
    assert names == sorted(set(names))
    assert "compress_cluster-c128-aligned-t4d64s1w4n1c" in names


def test_without_the_specialised_block_size_only_general_variants_are_planned() -> None:
    (target,) = plan("nvidia:sm_80", given=replace(SPEC, state_block_sizes=("any",))).targets
    assert {variant.layout for variant in target.variants} == {"general"}


def test_a_unit_states_what_its_layout_assumes() -> None:
    (target,) = plan("nvidia:sm_80").targets
    by_layout = {kernel.layout: kernel.unit for kernel in target.kernels}
    assert by_layout["aligned"].divisible_by_16 == route.ALIGNED_FIELDS
    assert by_layout["general"].divisible_by_16 == ()
    assert dict(by_layout["aligned"].constexprs)["BLOCK_SIZE"] == 8
    assert dict(by_layout["general"].constexprs)["BLOCK_SIZE"] == 0
    assert by_layout["general"].signature == tuple((arg.field, arg.type) for arg in route.ARGS)
    assert dict(by_layout["general"].options)["enable_fp_fusion"] is False


def test_equal_units_are_planned_once() -> None:
    # Two rows with one tile, and the finalize kernel that two scan tiles share.
    other = replace(SCAN, block_d=128)
    planned = plan("nvidia:sm_80", rows=table((8, SCAN), (16, SCAN), (64, other), (None, FUSED)))
    (target,) = planned.targets
    keys = [unit.key for unit in planned.units]
    assert len(keys) == len(set(keys)) < len(target.kernels)
    finalizers = [
        k
        for k in target.kernels
        if k.unit.function == "compress_finalize" and k.ratio == 128 and k.layout == "aligned"
    ]
    assert len(finalizers) == 2
    assert len({kernel.unit.key for kernel in finalizers}) == 1


def test_tiles_of_build_yaml_take_the_tables_place() -> None:
    own = {"gfx942": (tuning.Row(None, Tile(4, 256, 1, 4, 1)),)}
    amd = replace(SPEC.targets["amd"], tiles=own)
    given = replace(SPEC, targets={**SPEC.targets, "amd": amd})
    (target,) = plan("amd:gfx942", rows=table((64, SCAN), (None, FUSED)), given=given).targets
    assert {kernel.tile for kernel in target.kernels} == {Tile(4, 256, 1, 4, 1)}


def test_the_plan_does_not_depend_on_the_order_or_repetition_of_targets() -> None:
    names = ["nvidia:sm_90", "amd:gfx942", "cpu:x86_64", "nvidia:sm_80"]
    assert plan(*names) == plan(*reversed(names), *names)
    assert [str(target.name) for target in plan(*names).targets] == sorted(names)


def test_a_cpu_target_has_its_own_host_and_no_units() -> None:
    (target,) = plan("cpu:aarch64").targets
    assert target.hosts == ("aarch64-linux-gnu.2.17",)
    assert (target.kernels, target.variants) == ((), ())
    assert target.toolchain == {"zig": "0.17"}
    changed = plan("cpu:aarch64", read=lambda path: f"new {path}").targets[0]
    assert changed.source_digest != target.source_digest


def test_the_ptxas_of_each_arch_is_recorded() -> None:
    named = {
        str(t.name): t.toolchain["ptxas"]
        for t in plan("nvidia:sm_80", "nvidia:sm_90", "nvidia:sm_100").targets
    }
    assert named == {"nvidia:sm_80": "12.9.86", "nvidia:sm_90": "12.9.86", "nvidia:sm_100": "13.4.59"}


def one_unit() -> Unit:
    return plan("nvidia:sm_80").units[0]


OTHER = {
    "vendor": "other",
    "arch": "sm_86",
    "triton_target": ("cuda", 86, 32),
    "module": "gpgpu/other.py",
    "function": "other",
    "sources": (("gpgpu/compress.py", "0" * 64),),
    "signature": (("state_cache", "*fp16"),),
    "constexprs": (("RATIO", 1),),
    "divisible_by_16": ("kv_cache",),
    "options": (("num_warps", 16),),
    "environment": (("A", "b"),),
    "binary": "ptx",
    "toolchain": (("triton", "3.9.1"),),
    "recipe": "s",
}


@pytest.mark.parametrize("field", [field.name for field in fields(Unit)])
def test_every_field_of_a_unit_is_in_its_key(field: str) -> None:
    unit = one_unit()
    changed = replace(unit, **{field: OTHER[field]})  # type: ignore[arg-type]
    assert changed != unit
    assert changed.key != unit.key


def test_keys_do_not_change_between_processes() -> None:
    assert planning.digest({"b": [1, True, None], "a": "é"}) == (
        "170409917e32971e79e71df2c0a04cc84c3c089ef0c7c2a94dbde72cafebd52d"
    )


def test_an_edit_to_one_source_changes_only_the_units_made_of_it() -> None:
    before = plan("nvidia:sm_80", "cpu:x86_64")
    after = plan(
        "nvidia:sm_80", "cpu:x86_64", read=lambda p: f"text of {p}" + ("!" if p.startswith("cpu/") else "")
    )
    assert [u.key for u in before.units] == [u.key for u in after.units]
    edited = plan("nvidia:sm_80", read=lambda p: f"text of {p}" + ("!" if p == "gpgpu/scan.py" else ""))
    assert not {u.key for u in before.units} & {u.key for u in edited.units}
    assert edited.targets[0].source_digest != before.targets[1].source_digest


def test_the_tuning_space_is_a_variant_a_candidate_with_the_tables_general_rows_last() -> None:
    names = [TargetName("nvidia", "sm_90"), TargetName("amd", "gfx90a")]
    rows = table((8, CLUSTER), (None, FUSED))
    given = facts({str(name): rows for name in names})
    for target in planning.plan(SPEC, names, given, tune_space=True).targets:
        vendor = targets.load(target.name.vendor)
        tiles = space.candidates(vendor.forms(target.name.arch), vendor.shared_memory(target.name.arch))
        kernels = {kernel.name: kernel for kernel in target.kernels}
        for ratio in (128, 256, 512):
            variants = [variant for variant in target.variants if variant.ratio == ratio]
            aligned = [variant for variant in variants if variant.layout == "aligned"]
            assert tuple(kernels[v.kernels[0]].tile for v in aligned) == tiles
            assert {variant.max_outputs for variant in aligned} == {None}
            general = [(v.layout, v.max_outputs) for v in variants[len(tiles) :]]
            assert general == [("general", 8), ("general", None)]


def test_it_says_where_the_tiles_come_from() -> None:
    def said(given: spec.Spec = SPEC, measured: bool = False, tune_space: bool = False) -> str:
        names = [TargetName("nvidia", "sm_90")]
        tables = {"nvidia:sm_90": replace(table((None, FUSED)), measured=measured)}
        (target,) = planning.plan(given, names, facts(tables), tune_space=tune_space).targets
        return target.toolchain["tiles"]

    section = replace(SPEC.targets["nvidia"], tiles={"sm_90": (tuning.Row(None, FUSED),)})
    own = replace(SPEC, targets={"nvidia": section})
    assert said() == "reasoned, not measured"
    assert said(measured=True) == "measured"
    assert said(measured=True, given=own) == "given in build.yaml"
    assert said(measured=True, tune_space=True) == "every candidate of the tuning space"
    (cpu,) = plan("cpu:x86_64").targets
    assert "tiles" not in cpu.toolchain


def test_without_a_tuning_space_nothing_of_it_is_planned() -> None:
    (target,) = plan("nvidia:sm_90", rows=table((None, FUSED))).targets
    assert len([v for v in target.variants if v.layout == "aligned"]) == 3


def test_a_unit_depends_on_the_files_of_an_installed_compiler_and_the_manifest_not() -> None:
    def ascend(**trees: str) -> planning.PlannedTarget:
        tools = {"triton": "3.2.0", "bishengir-compile": "1.2.0"}
        (target,) = plan("ascend:910B2", versions={"ascend": tools}, trees=trees).targets
        return target

    plain, one, other = ascend(), ascend(ascend="1"), ascend(ascend="2")
    keys = [{unit.key for _, unit in target.units} for target in (plain, one, other)]
    assert not keys[0] & keys[1] and not keys[1] & keys[2] and ascend(nvidia="1") == plain
    assert one.toolchain == other.toolchain == plain.toolchain
    (target,) = plan("nvidia:sm_80").targets
    assert plan("nvidia:sm_80", trees={"ascend": "1"}).targets == (target,)
