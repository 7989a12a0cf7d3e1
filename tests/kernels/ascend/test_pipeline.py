"""The pipeline's description: names, arguments, memory, and that the sources say the same."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvbuild.kernels import ascend
from kvbuild.kernels.ascend import pipeline
from kvbuild.kernels.contract import COMPRESS_RATIOS, OPERANDS

FOLDER = Path(next(iter(ascend.__path__)))
FORMS = [
    (route, ratio, layout, block_d)
    for route, layouts in (("index_select", ("dense",)), ("block", ("aligned", "general")))
    for layout in layouts
    for ratio in COMPRESS_RATIOS
    for block_d in pipeline.BLOCK_DIMS
]
# The scalars of kvb_operands, beside the tensors that contract.OPERANDS names.
SCALARS = {
    "num_blocks", "state_page_stride", "state_row_stride", "block_size", "num_tokens", "num_outputs",
    "num_reqs", "blocks_per_req", "block_table_stride", "max_pos", "cos_sin_stride", "kv_pages",
    "kv_page_stride", "weight_is_fp32", "rms_norm_eps",
}  # fmt: skip


def every_stage() -> dict[str, pipeline.Stage]:
    return {stage.name: stage for form in FORMS for stage in pipeline.stages(*form)}


def test_a_name_means_one_stage() -> None:
    seen: dict[str, pipeline.Stage] = {}
    for form in FORMS:
        for stage in pipeline.stages(*form):
            assert seen.setdefault(stage.name, stage) == stage
    assert len(seen) == 3 * (1 + 4 + 2 * 4) + 4


def test_the_routes_share_what_follows_the_sum() -> None:
    gathered = pipeline.stages("index_select", 128, "dense", 512)
    direct = pipeline.stages("block", 128, "aligned", 512)
    assert [stage.kind for stage in gathered] == ["triton", "aclnn", "triton", "triton", "triton", "triton"]
    assert gathered[-3:] == direct[-3:] and len(direct) == 4


def test_every_stage_is_a_function_with_these_parameters() -> None:
    for stage in every_stage().values():
        if stage.kind != "triton":
            continue
        tree = ast.parse((FOLDER / stage.source).read_text())
        (found,) = (f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == stage.function)
        wanted = [each.name for each in stage.arguments] + [name for name, _ in stage.constexprs]
        assert [arg.arg for arg in found.args.args] == wanted
        assert len(stage.function) <= 49
        assert all((FOLDER / source).is_file() for source in stage.sources) and stage.source in stage.sources


def test_every_source_that_is_imported_is_named() -> None:
    for stage in every_stage().values():
        for source in stage.sources:
            for node in ast.walk(ast.parse((FOLDER / source).read_text())):
                if isinstance(node, ast.ImportFrom) and node.level == 1:
                    assert f"{node.module}.py" in stage.sources, (stage.name, source, node.module)


def test_arguments_are_operands_or_intermediates_of_types_that_the_chip_takes() -> None:
    tensors = {operand.name for operand in OPERANDS}
    for form in FORMS:
        buffers = {each.name for each in pipeline.intermediates(form[0], form[1])}
        for stage in pipeline.stages(*form):
            for argument in stage.arguments:
                known = buffers if argument.intermediate else tensors | SCALARS
                assert argument.field in known, (stage.name, argument)
                # fp16, bf16 and 8-bit scalars are passed wrongly by the chip's compiler.
                assert argument.type.startswith("*") or argument.type in ("i32", "i64", "fp32")
                assert argument.type.startswith("*") == (argument.field in buffers | tensors)


def test_nothing_is_read_before_it_is_written() -> None:
    first_user = {"place": "locate", "rows": "locate", "live": "locate", "gathered": "gather"}
    for form in FORMS:
        order = [stage.name.split("-")[0] for stage in pipeline.stages(*form)]
        for buffer in pipeline.intermediates(form[0], form[1]):
            users = [
                stage.name.split("-")[0]
                for stage in pipeline.stages(*form)
                if any(a.intermediate and a.field == buffer.name for a in stage.arguments)
            ]
            assert len(users) >= 2
            if form[0] == "index_select" and buffer.name in first_user:
                assert users[0] == first_user[buffer.name] and users == [n for n in order if n in users]


@pytest.mark.parametrize("route", pipeline.ROUTES)
@pytest.mark.parametrize("ratio", COMPRESS_RATIOS)
def test_a_chunk_keeps_within_its_bound(route: str, ratio: int) -> None:
    for chunk_bytes in (3 << 20, 10_000_001, 256 << 20):
        outputs = pipeline.chunk_outputs(route, ratio, chunk_bytes)
        _, size = pipeline.scratch_layout(route, ratio, outputs)
        assert outputs >= 1 and size <= chunk_bytes
        assert pipeline.bytes_per_output(route, ratio) * (outputs + 2) + 8 * 512 > chunk_bytes


def test_a_chunk_of_less_than_an_output_is_refused() -> None:
    with pytest.raises(ValueError, match=r"wanted at least 2109\d\d\d for ratio 512, found 2000000"):
        pipeline.chunk_outputs("index_select", 512, 2_000_000)


def test_a_gather_stays_below_32_bits() -> None:
    for ratio in COMPRESS_RATIOS:
        outputs = pipeline.chunk_outputs("index_select", ratio, 1 << 40)
        assert outputs * ratio * 1024 <= 1 << 31


@pytest.mark.parametrize("outputs", (1, 3, 1000))
def test_intermediates_lie_apart_and_aligned(outputs: int) -> None:
    for route, ratio in (("block", 128), ("index_select", 256)):
        offsets, size = pipeline.scratch_layout(route, ratio, outputs)
        end = 0
        for each in pipeline.intermediates(route, ratio):
            assert offsets[each.name] % 512 == 0 and offsets[each.name] >= end
            end = offsets[each.name] + each.bytes_per_output * outputs
        assert size % 512 == 0 and end <= size


def test_sizes() -> None:
    assert pipeline.bytes_per_output("block", 512) == 64 + 2048 + 1024 + 256 + 576 + 8
    assert pipeline.bytes_per_output("index_select", 512) == 3976 + 512 * (4 + 4 + 4096)


def test_a_grid_has_a_program_for_each_item_up_to_the_cores() -> None:
    stage = pipeline.scan(128, 64)
    assert [pipeline.grid(stage, outputs, 48) for outputs in (1, 5, 6, 7, 100_000)] == [8, 40, 48, 48, 48]
    assert pipeline.grid(stage, 1 << 40, 1 << 30) == 65_535


def test_a_layout_of_another_route_is_refused() -> None:
    with pytest.raises(ValueError, match="route block: wanted layout aligned or general, found 'dense'"):
        pipeline.stages("block", 128, "dense", 512)
    with pytest.raises(ValueError, match="block_d: wanted one of .*found 96"):
        pipeline.stages("block", 128, "general", 96)
