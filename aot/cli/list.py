"""`kvbuild list`: the targets of a bundle in short."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import output

if TYPE_CHECKING:
    from ...runtime.manifest import Manifest, Target


@click.command("list", help="Show which targets a bundle holds.")
@click.argument("file")
@output.json_option
def command(file: str, as_json: bool) -> int:
    from ...runtime.bundle import open_bundle

    path = output.existing_bundle(file)
    with open_bundle(path) as bundle:
        manifest = bundle.manifest
    summary = {"bundle": str(path), "size": path.stat().st_size, **summarise(manifest)}
    if as_json:
        output.emit_json(summary)
    else:
        click.echo(heading(summary))
        click.echo(targets_table(summary["targets"]))
        for line in (*evidence(manifest), *unfinished(manifest, path)):
            click.echo(line)
    return output.EXIT_DONE


def summarise(manifest: Manifest) -> dict[str, Any]:
    """A manifest in short, as JSON values. `manifest_sha256` is what the archive's comment holds."""
    return {
        "manifest_sha256": hashlib.sha256(manifest.canonical_bytes()).hexdigest(),
        "schema": manifest.schema,
        "kvbuild": manifest.kvbuild,
        "operator": manifest.operator,
        "targets": [_target(target, manifest.blobs) for target in manifest.targets],
    }


def _target(target: Target, sizes: Mapping[str, int]) -> dict[str, Any]:
    from ...kernels.contract import COMPRESS_RATIOS

    variants = target.staged.variants if target.staged else target.variants
    ratios = sorted({variant.ratio for variant in variants}) or list(COMPRESS_RATIOS)
    layouts = sorted({variant.layout for variant in variants}) or ["general"]
    return {
        "target": target.name,
        "route": target.route,
        "hosts": sorted(target.launchers),
        "ratios": ratios,
        "layouts": layouts,
        "stage": target.staged.stage if target.staged else "device",
        "variants": len(variants),
        "kernels": len(target.kernel_blobs),
        "size": sum(sizes[blob] for blob in target.blobs),
        "tiles": target.toolchain.get("tiles"),
        "evidence": target.toolchain.get("evidence"),
    }


def evidence(manifest: Manifest) -> list[str]:
    """A line about the targets of which the same is said to be unknown; none where nothing is."""
    said: dict[str, list[str]] = {}
    for target in manifest.targets:
        if "evidence" in target.toolchain:
            said.setdefault(target.toolchain["evidence"], []).append(target.name)
    return [f"{' '.join(names)}: {words}" for words, names in said.items()]


def unfinished(manifest: Manifest, path: Path) -> list[str]:
    """A line about the targets that cannot be loaded yet, and the command that finishes them; none where
    there are none."""
    from ..finish import OLDEST_CANN, is_unfinished

    names = [target.name for target in manifest.targets if is_unfinished(target)]
    verb = "is" if len(names) == 1 else "are"
    line = f"{', '.join(names)} {verb} compiled as far as HIVM: run `{finish_command(path)}`"
    return [f"{line} on a host with CANN {OLDEST_CANN} or newer"] if names else []


def finish_command(path: Path) -> str:
    """What a person types to finish a bundle."""
    return shlex.join(["kvbuild", "finish", str(path)])


def heading(summary: Mapping[str, Any]) -> str:
    """One line about the file."""
    return (
        f"{summary['bundle']}: {output.size_text(summary['size'])}, schema {summary['schema']}, "
        f"built by kvbuild {summary['kvbuild']}, manifest {summary['manifest_sha256'][:12]}"
    )


def targets_table(targets: list[dict[str, Any]]) -> str:
    """The targets, one a line."""
    head = ("target", "hosts", "ratios", "layouts", "variants", "kernels", "size")
    rows = [
        (
            entry["target"] + ("" if entry["stage"] == "device" else f" ({entry['stage']}, unfinished)"),
            " ".join(host.split("-")[0] for host in entry["hosts"]),
            " ".join(str(ratio) for ratio in entry["ratios"]),
            " ".join(entry["layouts"]),
            entry["variants"] or "-",
            entry["kernels"] or "-",
            output.size_text(entry["size"]),
        )
        for entry in targets
    ]
    return output.table(head, rows, right=("variants", "kernels", "size"))
