"""From a spec to the compile units and the variants made of them. Pure: no file, clock or process.

Whatever determines a binary is a field of its `Unit`; the unit's key is the digest of all of them.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from ..kernels.contract import SPECIALISED_BLOCK_SIZE
from ..kernels.gpgpu import route, space
from ..kernels.gpgpu.route import KernelForm, Tile
from . import targets
from .spec import Spec, TargetName, cpu_hosts
from .staging import PlannedPipeline, pipelines
from .targets import ascend
from .tuning import Row, Table

ALIGNMENT = 16


def canonical_json(value: object) -> bytes:
    """The one encoding that digests are taken of: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(value: object) -> str:
    """sha256 of the canonical JSON, in hex."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


@dataclass(frozen=True)
class Unit:
    """One compilation and everything that determines its binary.

    sources: (path under the kernels folder, sha256) of each file; module: the one that holds `function`.
    signature: (name, Triton type) of the runtime arguments in order. recipe: digest of the worker's text.
    """

    vendor: str
    arch: str
    triton_target: tuple[str, int | str, int]
    module: str
    function: str
    sources: tuple[tuple[str, str], ...]
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, int | bool], ...]
    divisible_by_16: tuple[str, ...]
    options: tuple[tuple[str, int | bool | str], ...]
    environment: tuple[tuple[str, str], ...]
    binary: str
    toolchain: tuple[tuple[str, str], ...]
    recipe: str

    @property
    def key(self) -> str:
        """Content address: sha256 over every field."""
        return digest({"kind": "unit", **asdict(self)})


@dataclass(frozen=True)
class PlannedKernel:
    """One kernel of a target as the manifest will list it, before it is compiled."""

    name: str
    ratio: int
    layout: str
    tile: Tile
    form: KernelForm
    unit: Unit


@dataclass(frozen=True)
class PlannedVariant:
    """What one call may launch: `kernels` by name, in order, for up to `max_outputs` outputs."""

    ratio: int
    layout: str
    max_outputs: int | None
    kernels: tuple[str, ...]
    scratch_per_output: int


@dataclass(frozen=True)
class PlannedStage:
    """One compiled stage of a staged target."""

    name: str
    unit: Unit


@dataclass(frozen=True)
class PlannedTarget:
    """One target.

    toolchain: version by tool. kernels: by name, each once. variants: in the launcher's order of preference.
    hosts: the platforms it gets a launcher for. stages, pipelines: what a staged target has in place of
    kernels and variants.
    """

    name: TargetName
    toolchain: Mapping[str, str]
    source_digest: str
    kernels: tuple[PlannedKernel, ...]
    variants: tuple[PlannedVariant, ...]
    hosts: tuple[str, ...]
    stages: tuple[PlannedStage, ...] = ()
    pipelines: tuple[PlannedPipeline, ...] = ()

    @property
    def units(self) -> tuple[tuple[str, Unit], ...]:
        """What is compiled for it: each unit and the kernel's or stage's name."""
        kernels = tuple((kernel.name, kernel.unit) for kernel in self.kernels)
        return kernels + tuple((stage.name, stage.unit) for stage in self.stages)


@dataclass(frozen=True)
class Plan:
    """All that a build does. sources: text of each source file; commands: per vendor its interpreter."""

    targets: tuple[PlannedTarget, ...]
    sources: Mapping[str, str]
    commands: Mapping[str, tuple[str, ...]]

    @property
    def units(self) -> tuple[Unit, ...]:
        """Every unit once, in order of target and kernel."""
        return tuple({unit.key: unit for target in self.targets for _, unit in target.units}.values())


@dataclass(frozen=True)
class Facts:
    """What planning needs from the outside.

    tables: per target its tuning table (GPGPU targets without tiles of their own in build.yaml).
    versions: per vendor the tools found. commands: per vendor its interpreter. zig: zig's version.
    cpu_sources: the host kernel's files. read: a source's text by its path under the kernels folder.
    recipe: digest of the worker. trees: per vendor whose compiler kvbuild installed, the digest of its files.
    """

    tables: Mapping[TargetName, Table]
    versions: Mapping[str, Mapping[str, str]]
    commands: Mapping[str, tuple[str, ...]]
    zig: str
    cpu_sources: Sequence[str]
    read: Callable[[str], str]
    recipe: str
    trees: Mapping[str, str] = field(default_factory=dict)


def plan(
    spec: Spec, wanted: Sequence[TargetName], facts: Facts, *, tune_space: bool = False
) -> Plan:
    """The plan for `wanted` (see spec.wanted_targets).

    tune_space: in place of the aligned rows, one variant for each candidate of the tuning space, each for any
    number of outputs. Such a bundle is as right as another, and slower until one of them is pinned.
    """
    sources: dict[str, str] = {}

    def read(path: str) -> str:
        if path not in sources:
            sources[path] = facts.read(path)
        return sources[path]

    planned = tuple(_target(spec, name, facts, read, tune_space) for name in sorted(set(wanted)))
    used = {name.vendor for name in wanted}
    return Plan(planned, sources, {v: c for v, c in facts.commands.items() if v in used})


def _target(
    spec: Spec, name: TargetName, facts: Facts, read: Callable[[str], str], tune_space: bool
) -> PlannedTarget:
    vendor = targets.load(name.vendor)
    tools = {**vendor.toolchain(name.arch, facts.versions.get(name.vendor, {})), "zig": facts.zig}
    if vendor.ROUTE == "cpu":
        texts = tuple((path, _sha(read(path))) for path in facts.cpu_sources)
        return PlannedTarget(name, tools, digest(texts), (), (), cpu_hosts(spec, name.arch))
    if vendor.ROUTE == "staged":
        return _staged_target(spec, name, facts, read, tools)

    kernels: dict[str, PlannedKernel] = {}
    variants: list[PlannedVariant] = []
    for ratio in spec.compress_ratios:
        rows = _rows(spec, name, ratio, facts)
        aligned = _space(name) if tune_space else rows
        aligned = aligned if SPECIALISED_BLOCK_SIZE in spec.state_block_sizes else ()
        for layout, row in [
            *(("aligned", row) for row in aligned),
            *(("general", row) for row in _general(rows)),
        ]:
            made = [
                _kernel(name, ratio, layout, row.tile, form, facts, read)
                for form in route.kernels_for(ratio, layout, row.tile)
            ]
            kernels.update((kernel.name, kernel) for kernel in made)
            variants.append(
                PlannedVariant(
                    ratio=ratio,
                    layout=layout,
                    max_outputs=row.max_outputs,
                    kernels=tuple(kernel.name for kernel in made),
                    scratch_per_output=route.scratch_per_output(row.tile),
                )
            )
    used = sorted({source for kernel in kernels.values() for source in kernel.unit.sources})
    return PlannedTarget(
        name=name,
        toolchain={**tools, "tiles": _origin(spec, name, facts, tune_space)},
        source_digest=digest(used),
        kernels=tuple(kernels[each] for each in sorted(kernels)),
        variants=tuple(variants),
        hosts=spec.hosts,
    )


def _rows(spec: Spec, name: TargetName, ratio: int, facts: Facts) -> tuple[Row, ...]:
    own = spec.targets[name.vendor].tiles.get(name.arch)
    return own if own is not None else facts.tables[name].rows[ratio]


def _origin(spec: Spec, name: TargetName, facts: Facts, tune_space: bool) -> str:
    """Where its tiles come from, in the words of the manifest."""
    if tune_space:
        return "every candidate of the tuning space"
    if name.arch in spec.targets[name.vendor].tiles:
        return "given in build.yaml"
    return "measured" if facts.tables[name].measured else "reasoned, not measured"


def _space(name: TargetName) -> tuple[Row, ...]:
    vendor = targets.load(name.vendor)
    tiles = space.candidates(vendor.forms(name.arch), vendor.shared_memory(name.arch))
    return tuple(Row(None, tile) for tile in tiles if vendor.SCRATCH or not route.scratch_per_output(tile))


def _general(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The general layout's rows: neighbours that come to the same tile are one."""
    made: list[Row] = []
    for row in rows:
        tile = route.general_tile(row.tile)
        if made and made[-1].tile == tile:
            made.pop()
        made.append(Row(row.max_outputs, tile))
    return tuple(made)


def _kernel(
    name: TargetName,
    ratio: int,
    layout: str,
    tile: Tile,
    form: KernelForm,
    facts: Facts,
    read: Callable[[str], str],
) -> PlannedKernel:
    vendor = targets.load(name.vendor)
    unit = _unit(
        name,
        "gpgpu",
        form.source,
        form.function,
        form.sources,
        facts,
        read,
        signature=tuple((arg.field, arg.type) for arg in route.ARGS),
        constexprs=form.constexprs,
        divisible_by_16=route.ALIGNED_FIELDS if layout == "aligned" else (),
        options=tuple(sorted(vendor.options(form).items())),
    )
    return PlannedKernel(f"{form.function}-c{ratio}-{layout}-{tile.tag}", ratio, layout, tile, form, unit)


def _staged_target(
    spec: Spec, name: TargetName, facts: Facts, read: Callable[[str], str], tools: Mapping[str, str]
) -> PlannedTarget:
    made = pipelines(spec, name)
    stages = {
        stage.name: stage for each in made for stage in each.stages if stage.kind == "triton"
    }
    planned = tuple(
        PlannedStage(
            each,
            _unit(
                name,
                "ascend",
                stages[each].source,
                stages[each].function,
                stages[each].sources,
                facts,
                read,
                signature=tuple((argument.name, argument.type) for argument in stages[each].arguments),
                constexprs=stages[each].constexprs,
                divisible_by_16=(),
                options=tuple(sorted(ascend.stage_options().items())),
            ),
        )
        for each in sorted(stages)
    )
    used = sorted({source for stage in planned for source in stage.unit.sources})
    return PlannedTarget(name, tools, digest(used), (), (), spec.hosts, planned, made)


def _unit(
    name: TargetName,
    folder: str,
    source: str,
    function: str,
    sources: Sequence[str],
    facts: Facts,
    read: Callable[[str], str],
    *,
    signature: tuple[tuple[str, str], ...],
    constexprs: tuple[tuple[str, int | bool], ...],
    divisible_by_16: tuple[str, ...],
    options: tuple[tuple[str, int | bool | str], ...],
) -> Unit:
    """The unit of a kernel in `folder`, whose source and sources are paths from there."""
    vendor = targets.load(name.vendor)
    tools = dict(vendor.toolchain(name.arch, facts.versions[name.vendor]))
    if name.vendor in facts.trees:
        tools["tree"] = facts.trees[name.vendor]
    paths = sorted(posixpath.normpath(posixpath.join(folder, each)) for each in sources)
    return Unit(
        vendor=name.vendor,
        arch=name.arch,
        triton_target=vendor.triton_target(name.arch),
        module=posixpath.normpath(posixpath.join(folder, source)),
        function=function,
        sources=tuple((path, _sha(read(path))) for path in paths),
        signature=signature,
        constexprs=constexprs,
        divisible_by_16=divisible_by_16,
        options=options,
        environment=tuple(sorted(vendor.environment(name.arch).items())),
        binary=vendor.BINARY,
        toolchain=tuple(sorted(tools.items())),
        recipe=facts.recipe,
    )


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
