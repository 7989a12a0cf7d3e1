"""`kvbuild compile`: build.yaml and targets in, one bundle file out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import output

if TYPE_CHECKING:
    from ..build import BuildResult
    from ..progress import Reporter

COMPILE_PIP = "pip install 'kvbuild[compile]'"


@click.command("compile", help="Compile targets of build.yaml into one bundle file. Needs no accelerator.")
@click.option("--config", metavar="FILE", help="The build.yaml to use (default: ./build.yaml, else the one "
              "in the package).")  # fmt: skip
@click.option("--target", "targets", multiple=True, metavar="VENDOR[:ARCH]", help="What to compile for; "
              "repeatable. A vendor alone is every arch that build.yaml lists.")  # fmt: skip
@click.option("-o", "--output", "destination", default=str(output.DEFAULT_BUNDLE), show_default=True,
              metavar="FILE", help="The bundle to write.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Compilations at once (default: the "
              "processors that this process may use).")  # fmt: skip
@click.option("--tune-space", is_flag=True, help="Build every candidate of the tuning space for "
              "`kvbuild tune`, in place of the tuning table's choice; takes some minutes.")  # fmt: skip
@click.option("--tuning", "tables", multiple=True, metavar="TABLE.yaml", help="A table that `kvbuild tune` "
              "wrote, in place of the packaged one for the target it names; repeatable.")  # fmt: skip
@click.option("--keep-going", is_flag=True, help="Write the bundle without what failed; exit 1 all the same.")
@output.json_option
def command(
    config: str | None,
    targets: tuple[str, ...],
    destination: str,
    jobs: int | None,
    tune_space: bool,
    tables: tuple[str, ...],
    keep_going: bool,
    as_json: bool,
) -> int:
    # What is wrong with the request comes before what is missing here, as far as it shows without build.yaml.
    path = output.writable_file(destination)
    if config is not None:
        output.existing_file(config, "--config", "name a build.yaml")
    advice = "name a table that `kvbuild tune` wrote"
    own_tables = [output.existing_file(table, "--tuning", advice) for table in tables]
    output.require("yaml", "kvbuild compile", COMPILE_PIP)

    from .. import build, bundle, cache, progress, spec

    found = spec.load(spec.find(config))
    spec.wanted_targets(found, targets)
    reporter: Reporter = progress.choose()
    store = cache.Cache(cache.default_folder(os.environ), reporter.note)
    plan = build.prepare(found, targets, tune_space=tune_space, own_tables=own_tables)
    result = build.build(
        plan,
        cache=store,
        jobs=jobs or len(os.sched_getaffinity(0)),
        keep_going=keep_going,
        reporter=reporter,
    )
    if result.manifest is not None:
        bundle.write(path, result.manifest, result.blobs)
    if as_json:
        output.emit_json(_summary(result, path))
    else:
        _say(result, path)
    return output.EXIT_DONE if result.ok else output.EXIT_FAILED


def _summary(result: BuildResult, path: Path) -> dict[str, Any]:
    from .list import summarise

    written = result.manifest is not None
    return {
        "ok": result.ok,
        "bundle": str(path) if written else None,
        "size": path.stat().st_size if written else None,
        "sha256": _sha256(path) if written else None,
        **(summarise(result.manifest) if result.manifest is not None else {"targets": []}),
        **result.report.to_json(),
    }


def _sha256(path: Path) -> str:
    import hashlib

    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _say(result: BuildResult, path: Path) -> None:
    report = result.report
    for failure in report.failures:
        click.echo(f"kvbuild: {failure.name} failed:\n{_indented(output.plain(failure.error))}", err=True)
    for dropped in report.dropped if result.manifest is not None else ():
        click.echo(f"kvbuild: left out: {dropped}", err=True)
    sys.stderr.flush()
    counts = (
        f"{report.units_compiled} kernels and {report.launchers_compiled} launchers compiled, "
        f"{report.units_cached} and {report.launchers_cached} from the cache, in {report.seconds:.1f} s"
    )
    if result.manifest is None:
        click.echo(f"kvbuild: {len(report.failures)} failed; no bundle was written ({counts})", err=True)
        return
    names = " ".join(target.name for target in result.manifest.targets)
    click.echo(f"{path}: {names}, {output.size_text(path.stat().st_size)}, sha256 {_sha256(path)}")
    click.echo(counts)
    from .list import evidence, unfinished

    for line in (*evidence(result.manifest), *unfinished(result.manifest, path)):
        click.echo(line)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines())
