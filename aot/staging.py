"""From a spec to the pipelines of a staged target, and from its compiled stages to its launch table.

Pure, like plan.py and assemble.py, of which this is the staged route's half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..kernels.ascend import pipeline
from ..kernels.ascend.pipeline import Argument, Stage
from ..kernels.contract import SPECIALISED_BLOCK_SIZE
from ..runtime.staged import Buffer, StageArgument, Staged, StagedVariant, StageKernel, StageOperator
from . import hivm
from .spec import Spec, TargetName
from .targets import ascend


@dataclass(frozen=True)
class PlannedPipeline:
    """One variant of a staged target: a route's stages for one ratio and layout."""

    route: str
    ratio: int
    layout: str
    block_d: int
    max_outputs: int | None
    chunk_bytes: int

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Its stages in launch order."""
        return pipeline.stages(self.route, self.ratio, self.layout, self.block_d)


def pipelines(spec: Spec, name: TargetName) -> tuple[PlannedPipeline, ...]:
    """The variants of a target in the launcher's order of preference."""
    extra = spec.targets[name.vendor].extra
    rows = extra.get("routes", ascend.DEFAULT_ROUTES)
    chunk_bytes = extra.get("chunk_bytes", ascend.DEFAULT_CHUNK_BYTES)
    assert isinstance(rows, tuple) and isinstance(chunk_bytes, int)
    block = ("aligned", "general") if SPECIALISED_BLOCK_SIZE in spec.state_block_sizes else ("general",)
    return tuple(
        PlannedPipeline(row.route, ratio, layout, row.block_d, row.max_outputs, chunk_bytes)
        for ratio in spec.compress_ratios
        for row in rows
        for layout in (("dense",) if row.route == "index_select" else block)
    )


def check_hivm(data: bytes, function: str, kinds: tuple[str, ...]) -> hivm.Hivm:
    """What a stage's HIVM says. ValueError where it is not the stage that was planned, or does not fit.

    kinds: the Triton types of its arguments.
    """
    try:
        found = hivm.read(data.decode())
    except UnicodeDecodeError:
        raise ValueError("wanted HIVM text, found bytes that are not UTF-8") from None
    if found.entry != function:
        raise ValueError(f"wanted the entry {function}, found {found.entry}")
    wanted = tuple(kind.replace("*u8", "*i8") for kind in kinds)
    if found.parameters != wanted:
        raise ValueError(f"wanted the parameters {', '.join(wanted)}, found {', '.join(found.parameters)}")
    over = found.ub_bytes - pipeline.UB_BYTES
    if over > 0:
        raise ValueError(
            f"unified buffer: wanted at most {pipeline.UB_BYTES} bytes, found {found.ub_bytes}, {over} too "
            "many; choose a smaller block_d"
        )
    return found


def staged_table(
    planned: tuple[PlannedPipeline, ...], compiled: Mapping[str, tuple[str, str, int]]
) -> Staged:
    """The launch table of pipelines whose stages are all compiled: by name their blob, entry and bytes of
    the unified buffer."""
    stages = {stage.name: stage for each in planned for stage in each.stages}
    kernels = []
    operators = []
    for name in sorted(stages):
        stage = stages[name]
        args = tuple(_argument(argument) for argument in stage.arguments)
        if stage.kind == "triton":
            blob, entry, ub_bytes = compiled[name]
            kernels.append(
                StageKernel(
                    name, entry, blob, args, dict(stage.constexprs), stage.per_output, ub_bytes
                )
            )
        else:
            operators.append(StageOperator(name, stage.function, args, dict(stage.constexprs)))
    variants = tuple(
        StagedVariant(
            ratio=each.ratio,
            layout=each.layout,
            max_outputs=each.max_outputs,
            route=each.route,
            block_d=each.block_d,
            chunk_bytes=each.chunk_bytes,
            chunk_outputs=pipeline.chunk_outputs(each.route, each.ratio, each.chunk_bytes),
            stages=tuple(stage.name for stage in each.stages),
            intermediates=tuple(
                Buffer(part.name, part.dtype, part.shape)
                for part in pipeline.intermediates(each.route, each.ratio)
            ),
        )
        for each in planned
    )
    return Staged("hivm", tuple(kernels), tuple(operators), variants)


def _argument(argument: Argument) -> StageArgument:
    return StageArgument(argument.name, argument.type, argument.field, argument.intermediate)
