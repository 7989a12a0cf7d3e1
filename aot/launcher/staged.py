"""The C text of a staged launch table, from the pipeline's description: what table.h and stages.h declare.

Pure: reads nothing and runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...kernels.ascend import pipeline
from ...kernels.ascend.pipeline import Argument, Stage
from ...kernels.contract import SPECIALISED_BLOCK_SIZE
from ...kernels.gpgpu.route import ALIGNED_FIELDS
from ..errors import BuildError
from .ctext import array, c_string, offsets

ALIGNMENT = 16

MAX_STAGES = 8
MAX_BUFFERS = 12
MAX_ARGUMENTS = 64

_BYTES = {"i32": 4, "fp32": 4, "i64": 8}


@dataclass(frozen=True)
class Pipeline:
    """One variant of a staged target: how a call of `ratio` is launched, in chunks within chunk_bytes."""

    route: str
    ratio: int
    layout: str
    block_d: int
    chunk_bytes: int

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Its stages in launch order."""
        return pipeline.stages(self.route, self.ratio, self.layout, self.block_d)

    @property
    def buffers(self) -> tuple[str, ...]:
        """The names of its intermediates, in the order of the scratch allocation."""
        return tuple(each.name for each in pipeline.intermediates(self.route, self.ratio))


@dataclass(frozen=True)
class StageKernel:
    """One compiled stage: its name in the pipeline, the symbol in its binary, and the binary's sha256."""

    name: str
    entry: str
    blob: str


@dataclass(frozen=True)
class StagedTable:
    """Everything that a staged launcher is compiled with.

    target: VENDOR:ARCH. device_type: DLPack's, as C spells it. digest: of the launch table in the manifest.
    variants: each pipeline and its limit of outputs, in the order of preference.
    """

    target: str
    device_type: str
    elf_machine: int
    digest: str
    kernels: tuple[StageKernel, ...]
    variants: tuple[tuple[Pipeline, int | None], ...]


def read_target(target: Mapping[str, Any], device_type: str) -> StagedTable:
    """What a launcher needs of one staged target of the manifest; device_type: DLPack's, as C spells it."""
    variants = tuple(
        (
            Pipeline(
                each["route"], each["ratio"], each["layout"], each["block_d"], each["chunk_bytes"]
            ),
            each["max_outputs"],
        )
        for each in target["variants"]
    )
    kernels = tuple(StageKernel(each["name"], each["entry"], each["blob"]) for each in target["kernels"])
    return StagedTable(
        f"{target['vendor']}:{target['arch']}",
        device_type,
        target["elf_machine"],
        target["launch_table"],
        kernels,
        variants,
    )


def generate_staged_table(table: StagedTable) -> str:
    """The C text that defines KVB_TABLE and KVB_STAGES. BuildError where a launcher cannot do it."""
    blobs = sorted({kernel.blob for kernel in table.kernels})
    ratios = sorted({each.ratio for each, _ in table.variants})
    lines = ['#include "table.h"', "", "#include <dlpack/dlpack.h>", ""]
    lines += array("const char *const", "blobs", [c_string(blob) for blob in blobs])
    lines += array("const kvb_kernel", "kernels", [
        f"{{.name = {c_string(kernel.name)}, .entry = {c_string(kernel.entry)}, "
        f".blob = {blobs.index(kernel.blob)}}}"
        for kernel in table.kernels
    ])  # fmt: skip
    lines += array("const kvb_variant", "variants", [
        f"{{.ratio = {each.ratio}, .max_outputs = {'INT64_MAX' if limit is None else limit}, "
        f".aligned = {int(each.layout == 'aligned')}}}"
        for each, limit in table.variants
    ])  # fmt: skip
    lines += array("const int64_t", "ratios", [str(ratio) for ratio in ratios])
    lines += array("const uint16_t", "aligned_fields", offsets(ALIGNED_FIELDS))
    members = {
        "target": c_string(table.target),
        "digest": c_string(table.digest),
        "device_type": table.device_type,
        "elf_machine": table.elf_machine,
        "aligned_block_size": SPECIALISED_BLOCK_SIZE,
        "aligned_mask": ALIGNMENT - 1,
        "num_blobs": len(blobs),
        "num_kernels": len(table.kernels),
        "num_variants": len(table.variants),
        "num_ratios": len(ratios),
        "num_aligned_fields": len(ALIGNED_FIELDS),
        "blobs": "blobs",
        "kernels": "kernels",
        "variants": "variants",
        "ratios": "ratios",
        "aligned_fields": "aligned_fields",
    }
    lines += ["const kvb_table KVB_TABLE = {"]
    lines += [f"  .{name} = {value}," for name, value in members.items()]
    lines += ["};", ""]
    _check_last(table)
    places = {kernel.name: index for index, kernel in enumerate(table.kernels)}
    return "\n".join(lines) + generate_stages([each for each, _ in table.variants], places)


def _check_last(table: StagedTable) -> None:
    last = {each.ratio: (each.layout, limit) for each, limit in table.variants}
    for ratio, (layout, limit) in last.items():
        if layout != "general" or limit is not None:
            raise BuildError(
                f"{table.target}: the last variant of ratio {ratio}: wanted layout general and max_outputs "
                f"null, so that every call finds one; found {layout} and {limit}"
            )


def generate_stages(pipelines: Sequence[Pipeline], kernels: Mapping[str, int]) -> str:
    """The C text that defines KVB_STAGES.

    pipelines: one a variant, in the launch table's order. kernels: by stage name, the place of its kernel in
    the launch table. Raises BuildError where a pipeline holds something that a launcher cannot do.
    """
    lines = ['#include "stages.h"', ""]
    lines += sorted({check for each in pipelines for check in _field_checks(each)})
    lines.append("")
    values: list[str] = []
    for index, each in enumerate(pipelines):
        _check(each, kernels)
        places = []
        for number, stage in enumerate(each.stages):
            name = f"arguments_{index}_{number}"
            lines += [f"static const kvb_stage_argument {name}[] = {{"]
            lines += [f"  {_argument(argument, each.buffers)}," for argument in stage.arguments]
            lines += ["};"]
            kernel = "KVB_GATHER" if stage.kind == "aclnn" else str(kernels[stage.name])
            places.append(f"{{{kernel}, {stage.per_output}, {len(stage.arguments)}, {name}}}")
        sizes = [
            str(part.bytes_per_output) for part in pipeline.intermediates(each.route, each.ratio)
        ]
        chunk = pipeline.chunk_outputs(each.route, each.ratio, each.chunk_bytes)
        values.append(
            f"{{.layout = KVB_{each.layout.upper()}, .num_stages = {len(each.stages)}, "
            f".num_buffers = {len(sizes)}, .chunk_outputs = {chunk},\n   .stages = {{{', '.join(places)}}},\n"
            f"   .buffers = {{{', '.join(sizes)}}}}}"
        )
    gathers = any(stage.kind == "aclnn" for each in pipelines for stage in each.stages)
    lines += ["", "static const kvb_pipeline pipelines[] = {", *(f"  {value}," for value in values), "};", ""]
    lines += [
        "const kvb_stages KVB_STAGES = {",
        "  .pipelines = pipelines,",
        f"  .buffer_alignment = {pipeline.SCRATCH_ALIGNMENT},",
        f"  .max_blocks = {pipeline.MAX_PROGRAMS},",
        f"  .needs_gather = {int(gathers)},",
        "};",
        "",
    ]
    return "\n".join(lines)


def _argument(argument: Argument, buffers: Sequence[str]) -> str:
    if argument.intermediate:
        return f"{{0, 0, {buffers.index(argument.field)}}}"
    return f"{{offsetof(kvb_operands, {argument.field}), {_size(argument)}, 0}}"


def _size(argument: Argument) -> int:
    return 8 if argument.type.startswith("*") else _BYTES[argument.type]


def _field_checks(each: Pipeline) -> list[str]:
    fields = {
        argument.field: _size(argument)
        for stage in each.stages
        for argument in stage.arguments
        if not argument.intermediate
    }
    return [
        f'_Static_assert(sizeof(((kvb_operands *)0)->{field}) == {size}, "{field}");'
        for field, size in fields.items()
    ]


def _check(each: Pipeline, kernels: Mapping[str, int]) -> None:
    where = f"pipeline {each.route} of ratio {each.ratio}, layout {each.layout}"
    if len(each.stages) > MAX_STAGES or len(each.buffers) > MAX_BUFFERS:
        raise BuildError(
            f"{where}: wanted at most {MAX_STAGES} stages and {MAX_BUFFERS} intermediates, found "
            f"{len(each.stages)} and {len(each.buffers)}"
        )
    for stage in each.stages:
        at = f"{where}: stage {stage.name}"
        if stage.kind == "aclnn":
            if stage.function != "aclnnIndexSelect" or len(stage.arguments) != 3:
                raise BuildError(f"{at}: wanted aclnnIndexSelect of three tensors, found {stage.function}")
        elif stage.name not in kernels:
            raise BuildError(f"{at}: wanted a kernel of that name in the target, found none")
        if len(stage.arguments) > MAX_ARGUMENTS:
            raise BuildError(f"{at}: wanted at most {MAX_ARGUMENTS} arguments, found {len(stage.arguments)}")
        for argument in stage.arguments:
            if not argument.type.startswith("*") and argument.type not in _BYTES:
                raise BuildError(
                    f"{at}: {argument.name}: wanted a pointer, i32, i64 or fp32, which are what the chip's "
                    f"compiler passes rightly; found {argument.type}"
                )
