"""`kvbuild finish`: compiles what a build machine without CANN had to leave as HIVM."""

from __future__ import annotations

import os
from pathlib import Path

import click

from . import output
from .list import heading, summarise, targets_table


@click.command("finish", help="Compile a bundle's HIVM kernels (Ascend) to the chip's code, on a host with "
               "CANN. The bundle is replaced, whole or not at all, unless -o names another.")  # fmt: skip
@click.argument("file", metavar="FILE.kvb")
@click.option("-o", "--output", "destination", metavar="OUT.kvb", help="Write the result here instead.")
@click.option("--hivmc", metavar="PATH", help="The compiler (default: the one on PATH, else CANN's, which "
              "ASCEND_HOME_PATH names).")  # fmt: skip
@click.option("--keep", metavar="FOLDER", type=click.Path(path_type=Path), help="Leave the HIVM of each "
              "kernel that fails in this folder, and the commands that compile it.")  # fmt: skip
@output.json_option
def command(
    file: str, destination: str | None, hivmc: str | None, keep: Path | None, as_json: bool
) -> int:
    from .. import finish

    source = output.existing_bundle(file)
    target = output.writable_file(file if destination is None else destination)

    def note(what: str) -> None:
        click.echo(f"hivmc: {what}", err=True)

    done = finish.finish(source, target, os.environ, hivmc, note, keep)
    summary = {"bundle": str(target), "size": target.stat().st_size, **summarise(done.manifest)}
    if as_json:
        tool = {"path": str(done.hivmc.path), "version": done.hivmc.version}
        done_here = {"finished": list(done.targets), "compiled": done.kernels, "hivmc": tool}
        output.emit_json({**done_here, **summary})
        return output.EXIT_DONE
    click.echo(
        f"{', '.join(done.targets)}: {done.kernels} kernels compiled by hivmc {done.hivmc.version}; try "
        f"them on a device with: kvbuild check {target}"
    )
    click.echo(heading(summary))
    click.echo(targets_table(summary["targets"]))
    return output.EXIT_DONE
