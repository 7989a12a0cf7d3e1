"""`kvbuild inspect`: everything a bundle says of itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from . import output

if TYPE_CHECKING:
    from ...runtime.manifest import Kernel, Manifest, Target
    from ...runtime.staged import Staged

Resources = Mapping[str, int] | None


@click.command("inspect", help="Show everything in a bundle: kernels, tiles, toolchains, numerics, digests.")
@click.argument("file")
@output.json_option
def command(file: str, as_json: bool) -> int:
    from ...runtime.bundle import open_bundle

    path = output.existing_bundle(file)
    with open_bundle(path) as bundle:
        manifest, digest, size = bundle.manifest, bundle.digest, bundle.size
        used = {
            kernel.blob: resources(target.vendor, bundle.read(kernel.blob), kernel.entry)
            for target in manifest.targets
            for kernel in target.kernels
        }
    if as_json:
        output.emit_json(
            {
                "bundle": str(path),
                "size": size,
                "manifest_sha256": digest,
                "manifest": manifest.to_json(),
                "resources": used,
            }
        )
    else:
        click.echo("\n".join(_text(str(path), size, digest, manifest, used)))
    return output.EXIT_DONE


def resources(vendor: str, binary: bytes, entry: str) -> Resources:
    """Registers and spill bytes a thread, as the binary says; None where this kvbuild cannot read them."""
    from .. import targets

    if vendor not in targets.names():
        return None
    try:
        return targets.load(vendor).resources(binary, entry)
    except ValueError:
        return None


def _text(
    path: str, size: int, digest: str, manifest: Manifest, used: Mapping[str, Resources]
) -> Iterator[str]:
    yield f"{path}: {size:,} bytes, schema {manifest.schema}, built by kvbuild {manifest.kvbuild}"
    yield f"operator  {manifest.operator}"
    yield f"manifest  {digest}"
    yield f"blobs     {len(manifest.blobs)}, {sum(manifest.blobs.values()):,} bytes"
    for target in manifest.targets:
        yield ""
        yield from _target_text(path, target, manifest.blobs, used)


def _target_text(
    path: str, target: Target, sizes: Mapping[str, int], used: Mapping[str, Resources]
) -> Iterator[str]:
    from ...runtime.manifest import IN_WORDS
    from ..finish import OLDEST_CANN, is_unfinished
    from .list import finish_command

    open_yet = is_unfinished(target)
    yield output.paint(target.name, "cyan")
    warp = f", {target.warp_size} threads a warp" if target.warp_size else ""
    machine = "not yet" if open_yet and not target.elf_machine else target.elf_machine
    yield f"  route         {target.route}{warp}, ELF machine {machine}"
    if target.staged:
        how = f", unfinished: run `{finish_command(Path(path))}` on a host with CANN {OLDEST_CANN} or newer"
        yield f"  compiled to   {target.staged.stage}{how if open_yet else ''}"
    yield f"  driver        {driver_text(target.vendor, target.min_driver)}"
    yield f"  toolchain     {', '.join(f'{name} {text}' for name, text in sorted(target.tools.items()))}"
    for name in IN_WORDS:
        if name in target.toolchain:
            yield f"  {name:12}  {target.toolchain[name]}"
    fusion = "on" if target.numerics.fp_fusion else "off"
    yield f"  numerics      multiply-add fusion {fusion}, denormals {target.numerics.denormals}"
    yield f"  sources       {target.source_digest}"
    yield f"  launch table  {target.launch_table}"
    launchers = [(host, f"{sizes[blob]:,}", blob[:12]) for host, blob in sorted(target.launchers.items())]
    yield from _indented(output.table(("launcher", "bytes", "blob"), launchers, right=("bytes",)))
    if target.staged:
        yield from _staged_text(target.staged, sizes)
    if target.variants:
        head = ("ratio", "layout", "outputs up to", "scratch an output", "launches")
        rows = [
            (
                variant.ratio,
                variant.layout,
                "any" if variant.max_outputs is None else variant.max_outputs,
                f"{variant.scratch_per_output:,} B" if variant.scratch_per_output else "none",
                ", ".join(variant.kernels),
            )
            for variant in target.variants
        ]
        right: tuple[str, ...] = ("ratio", "outputs up to", "scratch an output")
        yield from _indented(output.table(head, rows, right=right))
    if target.kernels:
        kernel_rows = [_kernel_row(kernel, sizes, used) for kernel in target.kernels]
        right = ("warps", "cluster", "registers", "spilled", "shared", "bytes")
        yield from _indented(output.table(_KERNEL_HEAD, kernel_rows, right=right))


def _staged_text(staged: Staged, sizes: Mapping[str, int]) -> Iterator[str]:
    from ...kernels.ascend.pipeline import UB_BYTES

    head: tuple[str, ...] = ("ratio", "layout", "outputs up to", "route", "chunk", "stages")
    rows = [
        (
            variant.ratio,
            variant.layout,
            "any" if variant.max_outputs is None else variant.max_outputs,
            variant.route,
            f"{variant.chunk_outputs:,} outputs, {variant.chunk_bytes:,} B",
            ", ".join(variant.stages),
        )
        for variant in staged.variants
    ]
    yield from _indented(output.table(head, rows, right=("ratio", "outputs up to")))
    stages: list[tuple[object, ...]] = [
        (
            kernel.name,
            kernel.entry,
            f"{kernel.ub_bytes:,} of {UB_BYTES:,}",
            f"{sizes[kernel.blob]:,}",
            kernel.blob[:12],
        )
        for kernel in staged.kernels
    ]
    stages += [(operator.name, operator.function, "-", "-", "-") for operator in staged.operators]
    head = ("stage", "entry", "unified buffer", "bytes", "blob")
    yield from _indented(output.table(head, stages, right=("unified buffer", "bytes")))


_KERNEL_HEAD = (
    "kernel", "tile", "warps", "cluster", "registers", "spilled", "shared", "assumes", "bytes", "blob",
)  # fmt: skip


def _kernel_row(
    kernel: Kernel, sizes: Mapping[str, int], used: Mapping[str, Resources]
) -> tuple[object, ...]:
    found = used[kernel.blob]
    tile = kernel.tile
    shape = f"t{tile.block_t} d{tile.block_d} s{tile.split} n{tile.num_stages}"
    parts = []
    if kernel.assumes.block_size:
        parts.append(f"block_size {kernel.assumes.block_size}")
    if kernel.assumes.alignment:
        parts.append(f"{kernel.assumes.alignment}-byte alignment")
    return (
        kernel.name,
        shape,
        kernel.num_warps,
        kernel.cluster,
        "?" if found is None else found["registers"],
        "?" if found is None else found["spill_bytes"],
        f"{kernel.shared:,}",
        ", ".join(parts) or "nothing",
        f"{sizes[kernel.blob]:,}",
        kernel.blob[:12],
    )


def driver_text(vendor: str, version: int) -> str:
    """The oldest driver in words; NVIDIA counts 1000 * major + 10 * minor."""
    if not version:
        return "none needed" if vendor == "cpu" else "any"
    if vendor == "nvidia":
        return f"CUDA {version // 1000}.{version % 1000 // 10} or newer"
    return f"{version} or newer"


def _indented(text: str) -> Iterator[str]:
    yield ""
    for line in text.splitlines():
        yield f"  {line}"
