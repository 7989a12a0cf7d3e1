"""The route as data: tiles, arguments and kernels agree with each other, the sources and what is shipped."""

from __future__ import annotations

import ast
import itertools
import posixpath
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvbuild.aot import targets
from kvbuild.aot.plan import Plan, PlannedTarget, PlannedVariant
from kvbuild.aot.spec import TargetName
from kvbuild.kernels.contract import COMPRESS_RATIOS, HEAD_DIM, OPERANDS
from kvbuild.kernels.gpgpu import route
from kvbuild.kernels.gpgpu.route import KernelForm, Tile

FOLDER = Path(route.__file__).parent
NAMES = [
    TargetName(vendor, arch)
    for vendor in targets.names()
    for arch in targets.load(vendor).ARCHS
    if targets.load(vendor).ROUTE == "gpgpu"
]


def forms_of(plan: Plan) -> list[KernelForm]:
    return list(dict.fromkeys(kernel.form for target in plan.targets for kernel in target.kernels))


def kernels_of(source: str) -> dict[str, list[str]]:
    """The parameters of each function of a source file that takes the first of route.ARGS."""
    tree = ast.parse((FOLDER / source).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    found = {each.name: [arg.arg for arg in each.args.args] for each in functions}
    first = [arg.field for arg in route.ARGS[:3]]
    return {name: parameters for name, parameters in found.items() if parameters[:3] == first}


def test_importing_the_route_imports_no_triton() -> None:
    code = "import sys, kvbuild.kernels.gpgpu.route; sys.exit(bool({'triton', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_arguments_begin_with_the_contracts_operands() -> None:
    assert [arg.field for arg in route.ARGS[: len(OPERANDS)]] == [operand.name for operand in OPERANDS]
    types = {"float32": "*fp32", "int32": "*i32", "int64": "*i64", "bfloat16": "*bf16", "uint8": "*u8"}
    assert [arg.type for arg in route.ARGS[: len(OPERANDS)]] == [types[each.dtypes[0]] for each in OPERANDS]
    assert set(route.ALIGNED_FIELDS) <= {arg.field for arg in route.ARGS}


def test_every_kernel_takes_the_arguments_and_constants_it_is_given(shipped: Plan) -> None:
    fields = [arg.field for arg in route.ARGS]
    for form in forms_of(shipped):
        constants = [name for name, _ in form.constexprs]
        assert kernels_of(form.source)[form.function] == fields + constants, form


def test_every_kernel_that_is_written_is_used_by_a_shipped_tile(shipped: Plan) -> None:
    used = {(form.source, form.function) for form in forms_of(shipped)}
    written = {(path.name, name) for path in FOLDER.glob("*.py") for name in kernels_of(path.name)}
    assert written == used


def imported(source: str) -> set[str]:
    """The files that a source imports, by their paths from the kernels' folder."""
    found = set()
    for node in ast.walk(ast.parse((FOLDER / source).read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            up = "../" * (node.level - 1)
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {f"{up}{name}.py" for name in names}
    return found


def test_a_form_names_every_file_that_its_text_depends_on(shipped: Plan) -> None:
    # The key of a cached binary is made of these: one left out would be a wrong hit.
    for form in forms_of(shipped):
        wanted, waiting = set(), {form.source}
        while waiting:
            source = waiting.pop()
            wanted.add(source)
            waiting |= {posixpath.normpath(each) for each in imported(source)} - wanted
        assert set(map(posixpath.normpath, form.sources)) == wanted, form.function


def test_every_shipped_kernel_is_one_that_its_tile_stands_for(shipped: Plan) -> None:
    for target in shipped.targets:
        kernels = {kernel.name: kernel for kernel in target.kernels}
        for variant in target.variants:
            made = [kernels[name] for name in variant.kernels]
            tile = made[0].tile
            tile.check()
            assert Tile.parse(tile.to_json()) == tile
            assert {kernel.tile for kernel in made} == {tile}
            forms = route.kernels_for(variant.ratio, variant.layout, tile)
            assert tuple(kernel.form for kernel in made) == forms
            assert variant.scratch_per_output == route.scratch_per_output(tile)
            assert (variant.scratch_per_output > 0) == (len(made) == 2)
            for kernel in made:
                constants = dict(kernel.form.constexprs)
                assert constants["RATIO"] == variant.ratio
                assert constants["BLOCK_SIZE"] == (8 if variant.layout == "aligned" else 0)
                assert kernel.form.per_output >= 1 and kernel.form.y == 1


def test_tags_of_tiles_tell_them_apart() -> None:
    first = Tile(4, 512, 1, 4, 1)
    changes = {"block_t": 8, "block_d": 64, "split": 2, "num_warps": 2, "num_stages": 3, "cluster": True}
    tiles = [first, *(replace(first, **{name: value}) for name, value in changes.items())]
    assert len({tile.tag for tile in tiles}) == len(tiles)
    assert Tile(4, 64, 1, 4, 2, True).tag == "t4d64s1w4n2c"


PLAIN = ("compress_scan", "compress_finalize")


@pytest.mark.parametrize(
    ("tile", "layout", "functions", "programs", "scratch"),
    [
        (Tile(4, 512, 1, 4, 3), "aligned", ("compress_fused",), [1], 0),
        (Tile(4, 512, 1, 4, 3), "general", ("compress_fused",), [1], 0),
        (Tile(4, 512, 8, 4, 3), "general", PLAIN, [8, 1], 8 * 6144),
        (Tile(4, 128, 2, 4, 3), "aligned", PLAIN, [8, 1], 2 * 6144),
        (Tile(8, 512, 1, 4, 3), "aligned", ("compress_stream",), [1], 0),
        (Tile(4, 64, 1, 4, 3, True), "aligned", ("compress_cluster",), [1], 0),
        (Tile(4, 128, 1, 4, 3, True), "aligned", ("compress_cluster",), [1], 0),
    ],
    ids=lambda value: value.tag if isinstance(value, Tile) else None,
)
def test_the_kernels_of_a_tile(
    tile: Tile, layout: str, functions: tuple[str, ...], programs: list[int], scratch: int
) -> None:
    forms = route.kernels_for(256, layout, tile)
    assert tuple(form.function for form in forms) == functions
    assert [form.per_output for form in forms] == programs
    assert [form.num_ctas for form in forms] == [512 // tile.block_d if tile.cluster else 1] * len(forms)
    assert route.scratch_per_output(tile) == scratch


@pytest.mark.parametrize(
    ("tile", "functions", "scratch"),
    [
        (Tile(4, 64, 1, 4, 3, True), PLAIN, 8 * 6144),
        (Tile(4, 128, 1, 4, 1, True), PLAIN, 4 * 6144),
        (Tile(8, 512, 1, 4, 2), ("compress_fused",), 0),
        (Tile(4, 512, 2, 2, 1), PLAIN, 2 * 6144),
    ],
    ids=lambda value: value.tag if isinstance(value, Tile) else None,
)
def test_the_general_layout_of_a_tile_takes_plain_kernels(
    tile: Tile, functions: tuple[str, ...], scratch: int
) -> None:
    general = route.general_tile(tile)
    general.check()
    assert tuple(form.function for form in route.kernels_for(128, "general", general)) == functions
    assert route.scratch_per_output(general) == scratch
    if general != tile:
        with pytest.raises(ValueError, match=rf"tile {tile.tag} is for the aligned layout"):
            route.kernels_for(128, "general", tile)


GOOD: dict[str, object] = {"block_t": 4, "block_d": 512, "split": 1, "num_warps": 4, "num_stages": 1}
CLUSTER: dict[str, object] = {**GOOD, "block_d": 64, "cluster": True}
MISTAKES = [
    ({**GOOD, "blockd": 64}, "'blockd': wanted one of block_t, block_d, split, .*, cluster"),
    ({key: GOOD[key] for key in GOOD if key != "split"}, "'split': missing"),
    ({**GOOD, "num_warps": "4"}, "'num_warps': wanted a positive integer, found '4'"),
    ({**GOOD, "num_warps": True}, "'num_warps': wanted a positive integer, found True"),
    ({**GOOD, "num_stages": 0}, "'num_stages': wanted a positive integer, found 0"),
    ({**GOOD, "num_stages": 9}, "'num_stages': wanted 1, .* or 8.*, found 9"),
    ({**GOOD, "cluster": 1}, "'cluster': wanted true or false, found 1"),
    ({**GOOD, "block_t": 3}, "'block_t': wanted 4.*, found 3"),
    ({**GOOD, "block_d": 32}, "'block_d': wanted 64, 128, 256 or 512.*, found 32"),
    ({**GOOD, "split": 3}, "'split': wanted 1.* or 8.*, found 3"),
    ({**GOOD, "num_warps": 3}, "'num_warps': wanted 1, 2, 4, 8 or 16.*, found 3"),
    ({**GOOD, "block_t": 8, "split": 2}, "'split': wanted 1 where block_t is 8.*, found 2"),
    ({**CLUSTER, "block_t": 8}, "'block_t': wanted 4.*, found 8"),
    ({**CLUSTER, "block_d": 512}, "'block_d': wanted 64, 128 or 256 where.* cluster .*true, found 512"),
    ({**CLUSTER, "split": 2}, "'split': wanted .*1 .*cluster.*, found 2"),
    ({**CLUSTER, "num_warps": 8}, "'num_warps': wanted 1, 2 or 4 where.*, found 8"),
]


@pytest.mark.parametrize(("mapping", "text"), MISTAKES, ids=[text for _, text in MISTAKES])
def test_a_wrong_tile_is_refused_by_key(mapping: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^tile key {text}$"):
        Tile.parse(mapping)


def test_cluster_may_be_left_out() -> None:
    assert Tile.parse(GOOD) == Tile(4, HEAD_DIM, 1, 4, 1, False)
    assert Tile.parse(CLUSTER).cluster


def target_of(plan: Plan, name: TargetName) -> PlannedTarget:
    return next(target for target in plan.targets if target.name == name)


def taken(target: PlannedTarget, ratio: int, layout: str, num_outputs: int) -> PlannedVariant | None:
    """The variant that the launcher takes: the first whose ratio, layout and limit fit."""
    holds = route.LAYOUTS if layout == "aligned" else ("general",)
    for variant in target.variants:
        within = variant.max_outputs is None or num_outputs <= variant.max_outputs
        if variant.ratio == ratio and variant.layout in holds and within:
            return variant
    return None


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_coverage(shipped: Plan, name: TargetName) -> None:
    """Every class of call meets a variant, and every kernel shipped is one that some call meets."""
    target = target_of(shipped, name)
    limits = {variant.max_outputs for variant in target.variants if variant.max_outputs is not None}
    counts = sorted({0, 1, 2**31, *limits, *(limit + 1 for limit in limits)})
    met: set[PlannedVariant] = set()
    for ratio, layout, count in itertools.product(COMPRESS_RATIOS, route.LAYOUTS, counts):
        variant = taken(target, ratio, layout, count)
        assert variant is not None, (ratio, layout, count)
        assert variant.layout == layout, (ratio, layout, count)
        met.add(variant)
    assert met == set(target.variants)
    kernels = {kernel.name: kernel for kernel in target.kernels}
    assert {kernel for variant in met for kernel in variant.kernels} == set(kernels)
    for variant in target.variants:
        for kernel in (kernels[each] for each in variant.kernels):
            assert (kernel.ratio, kernel.layout) == (variant.ratio, variant.layout)


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_the_last_variant_of_a_ratio_takes_any_call(shipped: Plan, name: TargetName) -> None:
    for ratio in COMPRESS_RATIOS:
        last = [variant for variant in target_of(shipped, name).variants if variant.ratio == ratio][-1]
        assert (last.layout, last.max_outputs) == ("general", None)
