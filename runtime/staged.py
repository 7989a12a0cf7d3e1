"""The launch table of a staged target: compiled stages, operators of the vendor's library, and the pipelines
made of them. What stands here is data of kernels/ascend/pipeline.py, as a launcher was generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .launchtable import TYPE_SIZES, read_limit, table_digest, variant_name
from .strictjson import Node, field_names, repeated, shown

LAYOUTS = ("aligned", "dense", "general")
ROUTES = ("index_select", "block")
# hivm: memory-planned HIVM, which a host with CANN finishes. device: what the driver loads.
STAGES = ("hivm", "device")


@dataclass(frozen=True)
class StageArgument:
    """One argument of a stage: the parameter it is, its type, and what it is filled with: a field of
    kvb_operands, or the address of an intermediate of that name."""

    name: str
    type: str
    field: str
    intermediate: bool

    @classmethod
    def read(cls, node: Node) -> StageArgument:
        at = node.fields(field_names(cls))
        kind = at["type"].label()
        if not kind.startswith("*") and kind not in TYPE_SIZES:
            at["type"].fail(f"a pointer or one of {', '.join(TYPE_SIZES)}")
        intermediate = at["intermediate"].boolean()
        if intermediate and not kind.startswith("*"):
            at["type"].fail("a pointer, for an intermediate is passed by its address")
        return cls(at["name"].label(), kind, at["field"].label(), intermediate)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in field_names(type(self))}


@dataclass(frozen=True)
class StageKernel:
    """A compiled stage. blob: its HIVM text, or its device binary. ub_bytes: of the unified buffer, planned.

    per_output: work items an output; the grid is (min(items, vector cores), 1, 1) programs.
    """

    name: str
    entry: str
    blob: str
    args: tuple[StageArgument, ...]
    constexprs: Mapping[str, int]
    per_output: int
    ub_bytes: int

    @classmethod
    def read(cls, node: Node) -> StageKernel:
        at = node.fields(field_names(cls))
        return cls(
            name=at["name"].label(),
            entry=at["entry"].label(),
            blob=at["blob"].sha256(),
            args=at["args"].each(StageArgument.read),
            constexprs={name: value.integer() for name, value in at["constexprs"].labelled().items()},
            per_output=at["per_output"].integer(1, 65535),
            ub_bytes=at["ub_bytes"].integer(),
        )

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in field_names(type(self))}
        return plain | {"args": [arg.to_json() for arg in self.args], "constexprs": dict(self.constexprs)}


@dataclass(frozen=True)
class StageOperator:
    """A stage that the vendor's library runs; function: its name there. It has no binary of ours."""

    name: str
    function: str
    args: tuple[StageArgument, ...]
    constants: Mapping[str, int]

    @classmethod
    def read(cls, node: Node) -> StageOperator:
        at = node.fields(field_names(cls))
        return cls(
            name=at["name"].label(),
            function=at["function"].label(),
            args=at["args"].each(StageArgument.read),
            constants={name: value.integer() for name, value in at["constants"].labelled().items()},
        )

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in field_names(type(self))}
        return plain | {"args": [arg.to_json() for arg in self.args], "constants": dict(self.constants)}


@dataclass(frozen=True)
class Buffer:
    """An intermediate: `shape` elements of `dtype` for each output of a chunk."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def read(cls, node: Node) -> Buffer:
        at = node.fields(field_names(cls))
        dtype = at["dtype"].string(*TYPE_SIZES)
        return cls(at["name"].label(), dtype, at["shape"].each(lambda extent: extent.integer(1)))

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}


@dataclass(frozen=True)
class StagedVariant:
    """What one call may launch: `stages` by name, in order, for each chunk of up to `chunk_outputs` outputs,
    whose intermediates keep within `chunk_bytes`."""

    ratio: int
    layout: str
    max_outputs: int | None
    route: str
    block_d: int
    chunk_bytes: int
    chunk_outputs: int
    stages: tuple[str, ...]
    intermediates: tuple[Buffer, ...]

    @property
    def name(self) -> str:
        """Short form, such as c128-dense-64; any stands for no limit of outputs."""
        return variant_name(self.ratio, self.layout, self.max_outputs)

    @classmethod
    def read(cls, node: Node) -> StagedVariant:
        at = node.fields(field_names(cls))
        return cls(
            ratio=at["ratio"].integer(1),
            layout=at["layout"].string(*LAYOUTS),
            max_outputs=read_limit(at["max_outputs"]),
            route=at["route"].string(*ROUTES),
            block_d=at["block_d"].integer(1),
            chunk_bytes=at["chunk_bytes"].integer(1),
            chunk_outputs=at["chunk_outputs"].integer(1),
            stages=at["stages"].each(Node.label),
            intermediates=at["intermediates"].each(Buffer.read),
        )

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in field_names(type(self))}
        return plain | {
            "stages": list(self.stages),
            "intermediates": [each.to_json() for each in self.intermediates],
        }


@dataclass(frozen=True)
class Staged:
    """What a staged target has in place of the kernels and variants of the other routes.

    stage: how far its kernels are compiled, one of STAGES.
    """

    stage: str
    kernels: tuple[StageKernel, ...]
    operators: tuple[StageOperator, ...]
    variants: tuple[StagedVariant, ...]

    @classmethod
    def read(cls, at: Mapping[str, Node]) -> Staged:
        """Reads these fields of a target. Raises JsonError, also where they do not fit together."""
        staged = cls(
            stage=at["stage"].string(*STAGES),
            kernels=at["kernels"].each(StageKernel.read),
            operators=at["operators"].each(StageOperator.read),
            variants=at["variants"].each(StagedVariant.read),
        )
        staged._check(at)
        return staged

    @property
    def digest(self) -> str:
        """The sha256 of the canonical JSON of {kernels, operators, variants} without the kernels' blobs.

        A launcher knows a kernel's binary by the kernel's name, so that it stays as it is when the kernels
        are compiled to the end.
        """
        table = {name: value for name, value in self.to_json().items() if name != "stage"}
        for kernel in table["kernels"]:
            del kernel["blob"]
        return table_digest(table)

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "kernels": [kernel.to_json() for kernel in self.kernels],
            "operators": [operator.to_json() for operator in self.operators],
            "variants": [variant.to_json() for variant in self.variants],
        }

    def _check(self, at: Mapping[str, Node]) -> None:
        stages: dict[str, StageKernel | StageOperator] = {}
        for field, each in (("kernels", self.kernels), ("operators", self.operators)):
            names = [stage.name for stage in each]
            if len({*names, *stages}) != len(names) + len(stages):
                at[field].fail("each stage's name once", f"{shown(repeated([*stages, *names]))} repeated")
            stages |= {stage.name: stage for stage in each}
        if not self.variants:
            at["variants"].fail("one variant or more", "none")
        last: dict[int, int] = {}
        for index, variant in enumerate(self.variants):
            here = f"{at['variants'].path}[{index}]"
            if not variant.stages:
                Node(None, f"{here}.stages").fail("one stage or more", "none")
            buffers = {each.name for each in variant.intermediates}
            if len(buffers) != len(variant.intermediates):
                Node(None, f"{here}.intermediates").fail("each name once", "one repeated")
            for name in variant.stages:
                if name not in stages:
                    Node(None, f"{here}.stages").fail("stages that the target lists", shown(name))
                for arg in stages[name].args:
                    if arg.intermediate and arg.field not in buffers:
                        Node(None, f"{here}.intermediates").fail(f"{arg.field}, for {name} uses it", "it not")
            if (variant.route == "index_select") != (variant.layout == "dense"):
                found = f"{variant.route} with {variant.layout}"
                Node(None, f"{here}.layout").fail("dense for index_select, and for no other route", found)
            last[variant.ratio] = index
        for index in last.values():
            variant = self.variants[index]
            if variant.layout != "general" or variant.max_outputs is not None:
                Node(None, f"{at['variants'].path}[{index}]").fail(
                    f"the last variant of ratio {variant.ratio} to be general with max_outputs null",
                    f"{variant.layout} with max_outputs {shown(variant.max_outputs)}",
                )
