"""From finished units to a target's table in the manifest, each checked against what was planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256

from ..kernels.contract import SPECIALISED_BLOCK_SIZE
from ..runtime.launchtable import Assumes, Grid, Kernel, KernelArg, Tile, Variant, launch_table_digest
from ..runtime.manifest import Numerics, Target
from . import elf, targets
from .plan import ALIGNMENT, PlannedKernel, PlannedTarget, Unit
from .pool import Compiled
from .staging import check_hivm, staged_table

_SIZES = {"i32": 4, "fp32": 4, "i64": 8}
_POINTER = 8


@dataclass(frozen=True)
class Artifact:
    """A checked binary. offsets: of the runtime arguments, in order; hidden: trailing hidden pointers.

    machine: its e_machine. derived: whether offsets and hidden are derived, where the binary tells neither.
    """

    data: bytes
    entry: str
    num_warps: int
    num_ctas: int
    shared: int
    offsets: tuple[int, ...]
    hidden: int
    machine: int
    derived: bool

    @property
    def blob(self) -> str:
        return sha256(self.data).hexdigest()


def argument_size(kind: str) -> int:
    """Bytes of an argument of that Triton type in the parameter space."""
    return _POINTER if kind.startswith("*") else _SIZES[kind]


def natural_offsets(kinds: tuple[str, ...]) -> tuple[int, ...]:
    """Offsets of arguments that each lie at the next multiple of their own size."""
    offsets: list[int] = []
    end = 0
    for kind in kinds:
        size = argument_size(kind)
        end = -(-end // size) * size
        offsets.append(end)
        end += size
    return tuple(offsets)


def check(compiled: Compiled) -> Artifact:
    """The artifact of a unit. ValueError where the binary is not what the launcher can launch."""
    unit, facts = compiled.unit, compiled.facts
    vendor = targets.load(unit.vendor)
    if vendor.ROUTE == "staged":
        return _stage(compiled)
    data = vendor.device_code(compiled.data, unit.arch)
    machine = _machine(unit, data)
    for name in ("global_scratch", "profile_scratch"):
        if facts[name]:
            raise ValueError(
                f"wanted no {name.replace('_', ' ')}, found {facts[name]} bytes; launchers pass none"
            )
    warps = targets.limits(unit.vendor, unit.arch).max_warps
    if not 1 <= facts["num_warps"] <= warps:
        raise ValueError(f"wanted 1 to {warps} warps a block, found {facts['num_warps']}")
    wanted_ctas = dict(unit.options)["num_ctas"]
    if facts["num_ctas"] != wanted_ctas:
        raise ValueError(f"wanted {wanted_ctas} blocks a cluster, found {facts['num_ctas']}")
    most = vendor.shared_memory(unit.arch)
    if facts["shared"] > most:
        raise ValueError(
            f"wanted at most {most} bytes of shared memory a block, found {facts['shared']}; "
            "choose a tile config with fewer num_stages"
        )
    offsets, hidden, derived = _parameters(unit, data, facts["entry"])
    return Artifact(
        data,
        facts["entry"],
        facts["num_warps"],
        facts["num_ctas"],
        facts["shared"],
        offsets,
        hidden,
        machine,
        derived,
    )


def _stage(compiled: Compiled) -> Artifact:
    """The HIVM of a stage: `shared` is its part of the unified buffer, and its arguments' places are the
    launcher's to compute."""
    unit = compiled.unit
    found = check_hivm(compiled.data, unit.function, tuple(kind for _, kind in unit.signature))
    return Artifact(compiled.data, found.entry, 1, 1, found.ub_bytes, (), 0, 0, False)


def _machine(unit: Unit, data: bytes) -> int:
    found = elf.read(data).machine
    wanted = targets.load(unit.vendor).elf_machine(unit.arch)
    if wanted and found != wanted:
        raise ValueError(f"wanted ELF machine {wanted}, found {found}")
    if not wanted and found in elf.REGISTERED:
        raise ValueError(
            f"wanted an ELF machine that is {unit.vendor}'s own, found {found}, which means "
            f"{elf.REGISTERED[found]}"
        )
    return found


def _parameters(unit: Unit, data: bytes, entry: str) -> tuple[tuple[int, ...], int, bool]:
    """Offsets of the runtime arguments, the hidden pointers behind them, and whether both are derived."""
    found = targets.load(unit.vendor).parameters(data, entry)
    kinds = tuple(kind for _, kind in unit.signature)
    if found is None:
        return natural_offsets(kinds), targets.hidden_pointers(dict(unit.toolchain)["triton"]), True
    if len(found) < len(kinds):
        raise ValueError(f"wanted {len(kinds)} parameters or more, found {len(found)}")
    # Whatever lies behind our arguments is Triton's own: pointers that stay NULL without scratch.
    expected = natural_offsets((*kinds, *("*u8" for _ in found[len(kinds) :])))
    names = [name for name, _ in unit.signature]
    for index, parameter in enumerate(found):
        kind = kinds[index] if index < len(kinds) else "*u8"
        name = names[index] if index < len(names) else f"hidden parameter {index - len(names)}"
        size = argument_size(kind)
        if (parameter.offset, parameter.size) != (expected[index], size):
            raise ValueError(
                f"{name}: wanted {size} bytes at offset {expected[index]}, "
                f"found {parameter.size} at {parameter.offset}"
            )
    return expected[: len(kinds)], len(found) - len(kinds), False


@dataclass(frozen=True)
class Assembled:
    """target: without launchers; None where too little was built. dropped: what is left out, and why."""

    target: Target | None
    dropped: tuple[str, ...]


def assemble(planned: PlannedTarget, artifacts: Mapping[str, Artifact]) -> Assembled:
    """The manifest's target from the artifacts by unit key; a variant that lacks one is left out."""
    if planned.pipelines:
        return _staged(planned, artifacts)
    have = {kernel.name for kernel in planned.kernels if kernel.unit.key in artifacts}
    variants: list[Variant] = []
    dropped: list[str] = []
    for variant in planned.variants:
        lacking = [name for name in variant.kernels if name not in have]
        if lacking:
            limit = "" if variant.max_outputs is None else f", up to {variant.max_outputs} outputs"
            dropped.append(
                f"{planned.name}: the {variant.layout} variant of ratio {variant.ratio}{limit}, "
                f"for want of {', '.join(lacking)}"
            )
            if variant.layout == "general":
                dropped.append(
                    f"{planned.name}: the whole target, for want of ratio {variant.ratio}'s general variant"
                )
                return Assembled(None, tuple(dropped))
            continue
        variants.append(
            Variant(
                variant.ratio,
                variant.layout,
                variant.max_outputs,
                variant.kernels,
                variant.scratch_per_output,
            )
        )
    used = {name for variant in variants for name in variant.kernels}
    chosen = [(kernel, artifacts[kernel.unit.key]) for kernel in planned.kernels if kernel.name in used]
    machines = {artifact.machine for _, artifact in chosen}
    if len(machines) > 1:
        found = ", ".join(map(str, sorted(machines)))
        dropped.append(f"{planned.name}: the whole target, for its binaries are of the ELF machines {found}")
        return Assembled(None, tuple(dropped))
    return Assembled(_target(planned, chosen, tuple(variants)), tuple(dropped))


def _staged(planned: PlannedTarget, artifacts: Mapping[str, Artifact]) -> Assembled:
    have = {
        stage.name: artifacts[stage.unit.key] for stage in planned.stages if stage.unit.key in artifacts
    }
    kept = []
    dropped: list[str] = []
    for each in planned.pipelines:
        lacking = [stage.name for stage in each.stages if stage.kind == "triton" and stage.name not in have]
        if not lacking:
            kept.append(each)
            continue
        limit = "" if each.max_outputs is None else f", up to {each.max_outputs} outputs"
        dropped.append(
            f"{planned.name}: route {each.route} of ratio {each.ratio}, layout {each.layout}{limit}, for "
            f"want of {', '.join(lacking)}"
        )
        if each.layout == "general":
            dropped.append(
                f"{planned.name}: the whole target, for want of ratio {each.ratio}'s general variant"
            )
            return Assembled(None, tuple(dropped))
    table = staged_table(
        tuple(kept), {name: (made.blob, made.entry, made.shared) for name, made in have.items()}
    )
    target = replace(_target(planned, [], ()), staged=table, launch_table=table.digest)
    return Assembled(target, tuple(dropped))


def _target(
    planned: PlannedTarget, chosen: list[tuple[PlannedKernel, Artifact]], variants: tuple[Variant, ...]
) -> Target:
    vendor = targets.load(planned.name.vendor)
    numerics = vendor.numerics()
    kernels = tuple(_kernel(kernel, artifact) for kernel, artifact in chosen)
    machines = {artifact.machine for _, artifact in chosen} or {vendor.elf_machine(planned.name.arch)}
    toolchain = dict(planned.toolchain)
    if any(artifact.derived for _, artifact in chosen):
        toolchain["parameters"] = f"derived from Triton {toolchain['triton']}; the binaries do not tell them"
    return Target(
        vendor=planned.name.vendor,
        arch=planned.name.arch,
        route=vendor.ROUTE,
        warp_size=vendor.warp_size(planned.name.arch),
        elf_machine=machines.pop(),
        min_driver=vendor.min_driver(planned.toolchain),
        toolchain=toolchain,
        numerics=Numerics(bool(numerics["fp_fusion"]), str(numerics["denormals"])),
        source_digest=planned.source_digest,
        launchers={},
        launch_table=launch_table_digest(kernels, variants),
        kernels=kernels,
        variants=variants,
    )


def _kernel(planned: PlannedKernel, artifact: Artifact) -> Kernel:
    aligned = planned.layout == "aligned"
    return Kernel(
        name=planned.name,
        entry=artifact.entry,
        ratio=planned.ratio,
        layout=planned.layout,
        tile=Tile(**asdict(planned.tile)),
        blob=artifact.blob,
        num_warps=artifact.num_warps,
        cluster=artifact.num_ctas,
        shared=artifact.shared,
        args=tuple(
            KernelArg(name, kind, offset, argument_size(kind))
            for (name, kind), offset in zip(planned.unit.signature, artifact.offsets, strict=True)
        ),
        hidden=artifact.hidden,
        global_scratch=0,
        profile_scratch=0,
        constexprs=dict(planned.unit.constexprs),
        assumes=Assumes(SPECIALISED_BLOCK_SIZE if aligned else 0, ALIGNMENT if aligned else 0),
        grid=Grid(planned.form.per_output, planned.form.y),
    )
