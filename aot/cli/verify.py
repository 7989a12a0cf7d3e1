"""`kvbuild verify`: checks every byte of a bundle and names what is damaged."""

from __future__ import annotations

from typing import Any

import click

from . import output


@click.command("verify", help="Check every byte of a bundle; name each damaged entry.")
@click.argument("file")
@output.json_option
def command(file: str, as_json: bool) -> int:
    from ...runtime.bundle import open_bundle
    from ...runtime.errors import BundleError
    from .list import unfinished

    path = output.existing_bundle(file)
    entries: list[dict[str, Any]] = []
    # Opening checks the manifest and every structural byte; what it refuses is reported as the error itself.
    with open_bundle(path) as bundle:
        digest, size, manifest = bundle.digest, bundle.size, bundle.manifest
        for blob, length in sorted(bundle.manifest.blobs.items()):
            problem = None
            try:
                bundle.read(blob)
            except BundleError as error:
                problem = str(error)
            users = [target.name for target in bundle.manifest.targets if blob in target.blobs]
            entries.append(
                {"entry": blob, "size": length, "used_by": users, "ok": problem is None, "problem": problem}
            )
    damaged = [entry for entry in entries if not entry["ok"]]
    if as_json:
        output.emit_json(
            {
                "bundle": str(path),
                "size": size,
                "manifest_sha256": digest,
                "ok": not damaged,
                "entries": entries,
            }
        )
        return output.EXIT_FAILED if damaged else output.EXIT_DONE
    for entry in damaged:
        click.echo(
            f"{output.paint('damaged', 'red')}  used by {', '.join(entry['used_by'])}: {entry['problem']}"
        )
    if damaged:
        click.echo(f"{path}: {len(damaged)} of {len(entries)} entries damaged")
        return output.EXIT_FAILED
    click.echo(
        f"{path}: {output.paint('ok', 'green')}, manifest {digest} and {len(entries)} blobs, {size:,} bytes"
    )
    for line in unfinished(manifest, path):
        click.echo(line)
    return output.EXIT_DONE
