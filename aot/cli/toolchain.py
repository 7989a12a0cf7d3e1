"""`kvbuild toolchain install`: what a target compiles in, where a package registry has it."""

from __future__ import annotations

import os

import click

from . import output


@click.command("toolchain", help="Install the pinned compiler of a vendor whose compiler a package registry "
               "has, in a folder of its own, where `kvbuild compile` finds it.")  # fmt: skip
@click.argument("action", type=click.Choice(["install"]))
@click.argument("vendor")
@click.option("--python", metavar="PATH", help="The interpreter to install for (default: this one, else the "
              "one on PATH, of the version that the packages need).")  # fmt: skip
@click.option("--force", is_flag=True, help="Make it anew, also where a whole one is there.")
@output.json_option
def command(action: str, vendor: str, python: str | None, force: bool, as_json: bool) -> int:
    from .. import installed, targets
    from ..errors import RequestError

    if vendor not in targets.names():
        raise RequestError(
            f"toolchain {vendor!r}: unknown vendor; wanted {' or '.join(installed.vendors())}"
        )
    found = installed.install(vendor, os.environ, python, force, lambda text: click.echo(text, err=True))
    recipe = installed.recipe_of(vendor)
    assert recipe is not None
    if as_json:
        output.emit_json(installed.to_json(found, recipe))
        return output.EXIT_DONE
    what = "installed" if found.fresh else "already there"
    packages = ", ".join(f"{each.name} {each.version}" for each in recipe.packages)
    click.echo(f"{vendor}: {what}: {packages} in {found.folder}, for {found.python}")
    return output.EXIT_DONE
