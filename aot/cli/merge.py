"""`kvbuild merge`: bundles that were built on different machines become one."""

from __future__ import annotations

import click

from . import output
from .list import heading, summarise, targets_table


@click.command("merge", help="Put the targets of several bundles into one. A target in several "
               "of them must be the same in each.")  # fmt: skip
@click.argument("files", nargs=-1, required=True, metavar="A.kvb B.kvb ...")
@click.option("-o", "--output", "destination", required=True, metavar="FILE", help="The bundle to write.")
@output.json_option
def command(files: tuple[str, ...], destination: str, as_json: bool) -> int:
    from .. import bundle

    paths = [output.existing_bundle(file) for file in files]
    target = output.writable_file(destination)
    manifest = bundle.merge(paths, target)
    summary = {"bundle": str(target), "size": target.stat().st_size, **summarise(manifest)}
    if as_json:
        output.emit_json({"merged": [str(path) for path in paths], **summary})
    else:
        click.echo(heading(summary))
        click.echo(targets_table(summary["targets"]))
    return output.EXIT_DONE
