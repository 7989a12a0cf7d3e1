"""The launch table: the kernels of one target, and the variants that say which of them a call launches.

A launcher is generated from exactly this, and carries the table's digest.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .strictjson import Node, canonical, field_names, repeated, shown

LAYOUTS = ("aligned", "general")

# Bytes of one argument by its Triton type; every pointer is 8.
TYPE_SIZES = {
    "i1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "fp16": 2, "bf16": 2,
    "i32": 4, "u32": 4, "fp32": 4, "i64": 8, "u64": 8, "fp64": 8,
}  # fmt: skip


_MAX_KNOWN_ARGUMENTS = 64
_known_arguments: dict[bytes, tuple[KernelArg, ...]] = {}


@dataclass(frozen=True)
class Tile:
    """One row of tuning; the meaning of each number is the kernel route's."""

    block_t: int
    block_d: int
    split: int
    num_warps: int
    num_stages: int
    cluster: bool

    @classmethod
    def read(cls, node: Node) -> Tile:
        at = node.fields(field_names(cls))
        numbers = {name: at[name].integer(1) for name in field_names(cls) if name != "cluster"}
        return cls(**numbers, cluster=at["cluster"].boolean())

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in field_names(type(self))}


@dataclass(frozen=True)
class KernelArg:
    """One kernel argument: a field of kvb_operands, its type, and its place in the parameters, in bytes."""

    field: str
    type: str
    offset: int
    size: int

    @classmethod
    def read(cls, node: Node) -> KernelArg:
        at = node.fields(field_names(cls))
        kind = at["type"].label()
        size = at["size"].integer(1, 8)
        wanted = 8 if kind.startswith("*") else TYPE_SIZES.get(kind)
        if wanted is None:
            at["type"].fail(f"a pointer or one of {', '.join(TYPE_SIZES)}")
        if size != wanted:
            at["size"].fail(f"{wanted}, the bytes of {kind}")
        return cls(at["field"].label(), kind, at["offset"].integer(), size)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in field_names(type(self))}


@dataclass(frozen=True)
class Assumes:
    """What was compiled in about the operands: block_size and alignment in bytes; 0 where nothing was."""

    block_size: int
    alignment: int

    @classmethod
    def read(cls, node: Node) -> Assumes:
        at = node.fields(field_names(cls))
        return cls(at["block_size"].integer(), at["alignment"].integer())

    def to_json(self) -> dict[str, Any]:
        return {"block_size": self.block_size, "alignment": self.alignment}


@dataclass(frozen=True)
class Grid:
    """The launch grid: (num_outputs * per_output, y, 1) thread blocks, clusters counted out."""

    per_output: int
    y: int

    @classmethod
    def read(cls, node: Node) -> Grid:
        at = node.fields(field_names(cls))
        return cls(at["per_output"].integer(1), at["y"].integer(1, 65535))

    def to_json(self) -> dict[str, Any]:
        return {"per_output": self.per_output, "y": self.y}


@dataclass(frozen=True)
class Kernel:
    """One device binary and how it is launched. `shared` and the scratch sizes are in bytes."""

    name: str
    entry: str
    ratio: int
    layout: str
    tile: Tile
    blob: str
    num_warps: int
    cluster: int
    shared: int
    args: tuple[KernelArg, ...]
    hidden: int
    global_scratch: int
    profile_scratch: int
    constexprs: Mapping[str, int | bool | str]
    assumes: Assumes
    grid: Grid

    @classmethod
    def read(cls, node: Node) -> Kernel:
        at = node.fields(field_names(cls))
        return cls(
            name=at["name"].label(),
            entry=at["entry"].label(),
            ratio=at["ratio"].integer(1),
            layout=at["layout"].string(*LAYOUTS),
            tile=Tile.read(at["tile"]),
            blob=at["blob"].sha256(),
            num_warps=at["num_warps"].integer(1),
            cluster=at["cluster"].integer(1),
            shared=at["shared"].integer(),
            args=_arguments(at["args"]),
            hidden=at["hidden"].integer(),
            global_scratch=at["global_scratch"].integer(),
            profile_scratch=at["profile_scratch"].integer(),
            constexprs={name: _constant(value) for name, value in at["constexprs"].labelled().items()},
            assumes=Assumes.read(at["assumes"]),
            grid=Grid.read(at["grid"]),
        )

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in field_names(type(self))}
        return plain | {
            "tile": self.tile.to_json(),
            "args": [arg.to_json() for arg in self.args],
            "constexprs": dict(self.constexprs),
            "assumes": self.assumes.to_json(),
            "grid": self.grid.to_json(),
        }


def variant_name(ratio: int, layout: str, max_outputs: int | None) -> str:
    """What every route calls its variants in short: any stands for no limit of outputs."""
    return f"c{ratio}-{layout}-{max_outputs or 'any'}"


def read_limit(node: Node) -> int | None:
    """A limit of outputs; null, for no limit, becomes None."""
    return None if node.value is None else node.integer(1)


@dataclass(frozen=True)
class Variant:
    """What one call may launch: kernel names in order, for calls of up to `max_outputs` outputs."""

    ratio: int
    layout: str
    max_outputs: int | None
    kernels: tuple[str, ...]
    scratch_per_output: int

    @property
    def name(self) -> str:
        """Short form, such as c128-aligned-64; any stands for no limit of outputs."""
        return variant_name(self.ratio, self.layout, self.max_outputs)

    @classmethod
    def read(cls, node: Node) -> Variant:
        at = node.fields(field_names(cls))
        return cls(
            ratio=at["ratio"].integer(1),
            layout=at["layout"].string(*LAYOUTS),
            max_outputs=read_limit(at["max_outputs"]),
            kernels=at["kernels"].each(Node.string),
            scratch_per_output=at["scratch_per_output"].integer(),
        )

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in field_names(type(self))}
        return plain | {"kernels": list(self.kernels)}


def launch_table_digest(kernels: tuple[Kernel, ...], variants: tuple[Variant, ...]) -> str:
    """The sha256 of the canonical JSON of {kernels, variants}: what a launcher was generated from."""
    table = {
        "kernels": [kernel.to_json() for kernel in kernels],
        "variants": [variant.to_json() for variant in variants],
    }
    return table_digest(table)


def table_digest(table: Mapping[str, Any]) -> str:
    """The digest of a launch table that is JSON already."""
    return hashlib.sha256(canonical(table)).hexdigest()


def check_table(
    table_kernels: tuple[Kernel, ...], variants: tuple[Variant, ...], kernels_at: Node, variants_at: Node
) -> None:
    """Raises JsonError where names do not resolve or a call could find no variant."""
    kernels = {kernel.name: kernel for kernel in table_kernels}
    if len(kernels) != len(table_kernels):
        name = repeated(kernel.name for kernel in table_kernels)
        kernels_at.fail("each kernel name once", f"{shown(name)} repeated")
    last: dict[int, int] = {}
    for index, variant in enumerate(variants):
        at = Node(None, f"{variants_at.path}[{index}].kernels")
        if not variant.kernels:
            at.fail("one kernel or more", "none")
        for name in variant.kernels:
            kernel = kernels.get(name)
            if kernel is None:
                at.fail("kernels that `kernels` lists", shown(name))
            if (kernel.ratio, kernel.layout) != (variant.ratio, variant.layout):
                at.fail(
                    f"kernels of ratio {variant.ratio} and layout {variant.layout}",
                    f"{name} of ratio {kernel.ratio} and layout {kernel.layout}",
                )
        last[variant.ratio] = index
    for ratio, index in last.items():
        variant = variants[index]
        if variant.layout != "general" or variant.max_outputs is not None:
            Node(None, f"{variants_at.path}[{index}]").fail(
                f"the last variant of ratio {ratio} to be general with max_outputs null",
                f"{variant.layout} with max_outputs {shown(variant.max_outputs)}",
            )


def _arguments(node: Node) -> tuple[KernelArg, ...]:
    # Hundreds of kernels share a few argument lists; reading each anew would be half of loading a manifest.
    # Version 2 writes types and values only, so that equal bytes are equal lists, true and 1 kept apart.
    value: Any = node.value
    try:
        text = marshal.dumps(value, 2)
    except ValueError:
        node.fail("a list of arguments", "values nested too deeply")
    args = _known_arguments.get(text)
    if args is None:
        args = node.each(KernelArg.read)
        end = 0
        for index, arg in enumerate(args):
            if arg.offset < end:
                wanted = f"arguments in order that do not overlap: [{index}].offset >= {end}"
                node.fail(wanted, str(arg.offset))
            end = arg.offset + arg.size
        if len(_known_arguments) >= _MAX_KNOWN_ARGUMENTS:
            _known_arguments.clear()
        _known_arguments[text] = args
    return args


def _constant(node: Node) -> int | bool | str:
    if isinstance(node.value, str):
        return node.label()
    if not isinstance(node.value, (bool, int)):
        node.fail("an integer, a boolean or a string")
    return node.value
