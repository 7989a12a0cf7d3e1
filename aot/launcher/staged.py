"""A staged target of the manifest -> the C text of its launch table: what table.h and stages.h declare.

A launcher knows a stage's binary by the stage's name, not by the binary's digest, so that the launchers of a
bundle stay as they are when its kernels are compiled to the end elsewhere. Pure: reads and runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...kernels.ascend.pipeline import MAX_PROGRAMS, SCRATCH_ALIGNMENT
from ...kernels.contract import SPECIALISED_BLOCK_SIZE
from ...kernels.gpgpu.route import ALIGNED_FIELDS
from ..errors import BuildError
from .ctext import array, c_string, offsets

ALIGNMENT = 16
MAX_STAGES = 8
MAX_BUFFERS = 12
MAX_ARGUMENTS = 64
GATHER = "aclnnIndexSelect"

_BYTES = {"i32": 4, "fp32": 4, "i64": 8}
_ELEMENTS = {"i8": 1, "u8": 1, "i16": 2, "bf16": 2, "i32": 4, "fp32": 4, "i64": 8}

Json = Mapping[str, Any]


def generate_staged_table(target: Json, device_type: str, device_name: str) -> str:
    """The C text that defines KVB_TABLE and KVB_STAGES; device_type: DLPack's, as C spells it; device_name:
    what torch calls such a device.

    Raises BuildError where the target holds something that a launcher cannot do.
    """
    name = f"{target['vendor']}:{target['arch']}"
    kernels: Sequence[Json] = target["kernels"]
    variants: Sequence[Json] = target["variants"]
    stages = {stage["name"]: stage for stage in (*kernels, *target["operators"])}
    for variant in variants:
        _check_variant(name, variant, stages)
    _check_last(name, variants)
    ratios = sorted({variant["ratio"] for variant in variants})
    lines = ['#include "stages.h"', "", "#include <dlpack/dlpack.h>", ""]
    lines += _field_checks(stages.values())
    lines.append("")
    lines += array("const char *const", "blobs", [c_string(kernel["name"]) for kernel in kernels])
    lines += array("const kvb_kernel", "kernels", [_kernel(*each) for each in enumerate(kernels)])
    lines += array("const kvb_variant", "variants", [_variant(each) for each in variants])
    lines += array("const int64_t", "ratios", [str(ratio) for ratio in ratios])
    lines += array("const uint16_t", "aligned_fields", offsets(ALIGNED_FIELDS))
    lines += _struct("kvb_table", "KVB_TABLE", {
        "target": c_string(name),
        "digest": c_string(target["launch_table"]),
        "device_type": device_type,
        "device_name": f'"{device_name}"',
        "elf_machine": target["elf_machine"],
        "min_driver": target["min_driver"],
        "aligned_block_size": SPECIALISED_BLOCK_SIZE,
        "aligned_mask": ALIGNMENT - 1,
        "num_blobs": len(kernels),
        "num_kernels": len(kernels),
        "num_variants": len(variants),
        "num_ratios": len(ratios),
        "num_aligned_fields": len(ALIGNED_FIELDS),
        "blobs": "blobs",
        "kernels": "kernels",
        "variants": "variants",
        "ratios": "ratios",
        "aligned_fields": "aligned_fields",
    })  # fmt: skip
    places = {kernel["name"]: index for index, kernel in enumerate(kernels)}
    return "\n".join([*lines, *_pipelines(variants, stages, places)])


def _pipelines(variants: Sequence[Json], stages: Mapping[str, Json], places: Mapping[str, int]) -> list[str]:
    lines: list[str] = []
    values = []
    for index, variant in enumerate(variants):
        buffers = [each["name"] for each in variant["intermediates"]]
        used = []
        for number, name in enumerate(variant["stages"]):
            args = stages[name]["args"]
            lines += array(
                "const kvb_stage_argument",
                f"arguments_{index}_{number}",
                [_argument(arg, buffers) for arg in args],
            )
            per_output = stages[name].get("per_output", 1)
            place = places.get(name, "KVB_GATHER")
            used.append(f"{{{place}, {per_output}, {len(args)}, arguments_{index}_{number}}}")
        sizes = [str(_bytes_per_output(each)) for each in variant["intermediates"]]
        values.append(
            f"{{.layout = KVB_{variant['layout'].upper()}, .num_stages = {len(used)}, "
            f".num_buffers = {len(sizes)}, .chunk_outputs = {variant['chunk_outputs']}, "
            f".stages = {{{', '.join(used)}}}, .buffers = {{{', '.join(sizes)}}}}}"
        )
    lines += array("const kvb_pipeline", "pipelines", values)
    gathers = any(name not in places for variant in variants for name in variant["stages"])
    return lines + _struct("kvb_stages", "KVB_STAGES", {
        "pipelines": "pipelines",
        "buffer_alignment": SCRATCH_ALIGNMENT,
        "max_blocks": MAX_PROGRAMS,
        "needs_gather": int(gathers),
    })  # fmt: skip


def _struct(kind: str, name: str, members: Mapping[str, object]) -> list[str]:
    return [f"const {kind} {name} = {{", *(f"  .{field} = {value}," for field, value in members.items()),
            "};", ""]  # fmt: skip


def _kernel(index: int, kernel: Json) -> str:
    return f"{{.name = {c_string(kernel['name'])}, .entry = {c_string(kernel['entry'])}, .blob = {index}}}"


def _variant(variant: Json) -> str:
    limit = variant["max_outputs"]
    return (
        f"{{.ratio = {variant['ratio']}, .max_outputs = {'INT64_MAX' if limit is None else limit}, "
        f".aligned = {int(variant['layout'] == 'aligned')}}}"
    )


def _argument(arg: Json, buffers: Sequence[str]) -> str:
    if arg["intermediate"]:
        return f"{{0, 0, {buffers.index(arg['field'])}}}"
    return f"{{offsetof(kvb_operands, {arg['field']}), {_size(arg)}, 0}}"


def _size(arg: Json) -> int:
    return 8 if arg["type"].startswith("*") else _BYTES[arg["type"]]


def _bytes_per_output(buffer: Json) -> int:
    size = _ELEMENTS[buffer["dtype"]]
    for extent in buffer["shape"]:
        size *= extent
    return size


def _field_checks(stages: Any) -> list[str]:
    args = [arg for stage in stages for arg in stage["args"] if not arg["intermediate"]]
    sizes = {(arg["field"], _size(arg)) for arg in args}
    return [
        f'_Static_assert(sizeof(((kvb_operands *)0)->{c_string(field)[1:-1]}) == {size}, "{field}");'
        for field, size in sorted(sizes)
    ]


def _check_variant(target: str, variant: Json, stages: Mapping[str, Json]) -> None:
    where = f"{target}: variant of ratio {variant['ratio']}, layout {variant['layout']}"
    found = len(variant["stages"]), len(variant["intermediates"])
    if found[0] > MAX_STAGES or found[1] > MAX_BUFFERS:
        raise BuildError(
            f"{where}: wanted at most {MAX_STAGES} stages and {MAX_BUFFERS} intermediates, found {found[0]} "
            f"and {found[1]}"
        )
    for buffer in variant["intermediates"]:
        if buffer["dtype"] not in _ELEMENTS:
            raise BuildError(f"{where}: {buffer['name']}: wanted one of {', '.join(_ELEMENTS)}, found "
                             f"{buffer['dtype']}")  # fmt: skip
    for name in variant["stages"]:
        _check_stage(f"{where}: stage {name}", stages.get(name))


def _check_stage(where: str, stage: Json | None) -> None:
    if stage is None:
        raise BuildError(f"{where}: wanted a kernel or an operator of the target, found neither")
    args = stage["args"]
    if "function" in stage:
        constants = dict(stage["constants"])
        if stage["function"] != GATHER or len(args) != 3 or constants != {"dim": 0}:
            raise BuildError(
                f"{where}: wanted {GATHER} of three tensors and dim 0, which is the one operator that "
                f"launchers call; found {stage['function']} of {len(args)} and {constants}"
            )
    if len(args) > MAX_ARGUMENTS:
        raise BuildError(f"{where}: wanted at most {MAX_ARGUMENTS} arguments, found {len(args)}")
    for arg in args:
        if not arg["type"].startswith("*") and arg["type"] not in _BYTES:
            raise BuildError(
                f"{where}: {arg['name']}: wanted a pointer, i32, i64 or fp32, which are what the chip's "
                f"compiler passes rightly; found {arg['type']}"
            )


def _check_last(target: str, variants: Sequence[Json]) -> None:
    last = {variant["ratio"]: variant for variant in variants}
    if not last:
        raise BuildError(f"{target}: wanted one variant or more to launch, found none")
    for ratio, variant in last.items():
        if variant["layout"] != "general" or variant["max_outputs"] is not None:
            raise BuildError(
                f"{target}: the last variant of ratio {ratio}: wanted layout general and max_outputs "
                f"null, so that every call finds one; found {variant['layout']} and {variant['max_outputs']}"
            )
