"""`kvbuild tune`: measures the tile configs in a bundle on this device and writes the tuning table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RequestError, ToolchainError
from . import output

if TYPE_CHECKING:
    from ..choice import Candidate, Row
    from ..measure.candidates import Laboratory
    from ..measure.timing import Timing

TORCH_PIP = "pip install torch"


@click.command("tune", help="Measure the tile configs in a bundle on this GPU and write the tuning table. "
               "Build the bundle with `kvbuild compile --tune-space`; nothing is compiled here.")  # fmt: skip
@click.argument("file")
@click.option("-o", "--output", "destination", metavar="TABLE.yaml",
              help="The table to write (default: VENDOR-ARCH.yaml here).")  # fmt: skip
@click.option("--device", metavar="D", help="Where to run: cuda:0, ... (default: this process's device).")
@click.option("--quick", is_flag=True, help="Fewer numbers of outputs and fewer replays: a first look.")
@output.json_option
def command(file: str, destination: str | None, device: str | None, quick: bool, as_json: bool) -> int:
    path = output.existing_bundle(file)
    output.device_name(device)
    if device == "cpu":
        _nothing_to_tune("the cpu")
    if destination is not None:
        output.writable_file(destination)
    output.require("torch", "kvbuild tune", TORCH_PIP)

    import torch

    from ... import runtime
    from ..measure import candidates, provenance
    from ..measure.place import Place
    from ..publish import publish
    from ..tabletext import render

    with runtime.load(path, device=device) as operator:
        target = operator.target
        if target.route != "gpgpu":
            _nothing_to_tune(target.name)
        table = output.writable_file(destination or f"{target.vendor}-{target.arch}.yaml")
        found = candidates.candidates(operator)
        _check(path, found)
        if not torch.cuda.is_available():
            raise ToolchainError(
                f"kvbuild tune on {operator.device} needs a torch that can use it, found that "
                f"{torch.__version__} sees no GPU; install torch for this GPU"
            )
        place = Place(torch.device(operator.device))
        torch.cuda.set_device(place.device)
        say = (lambda text: click.echo(text, err=True)) if as_json else click.echo
        effort = candidates.QUICK if quick else candidates.FULL
        laboratory = candidates.Laboratory(operator, place.device, effort, say)
        where = provenance.record(operator, place)
        say(f"{path}: {target.name} on {place.name}, driver {where['versions']['driver'] or 'unknown'}")
        if laboratory.no_reader:
            say(f"the read ceiling is torch.sum's alone: {laboratory.no_reader}")
        results = {ratio: tune(laboratory, ratio, found[ratio]) for ratio in sorted(found)}
    rows = {ratio: each["rows"] for ratio, each in results.items()}
    text = render(target.name, _source(where, quick), rows)
    publish(table, "tuning table", [text.encode()])
    if as_json:
        whole = {"bundle": str(path), "table": str(table), "quick": quick, **where}
        output.emit_json({**whole, "ratios": {str(ratio): _json(each) for ratio, each in results.items()}})
    else:
        _show(table, target.name, results)
    return output.EXIT_DONE


def tune(laboratory: Laboratory, ratio: int, found: list[Candidate]) -> dict[str, Any]:
    """The rows of one ratio and what they were chosen by: points and ceilings by number of outputs."""
    from .. import choice
    from ..measure.candidates import output_counts

    laboratory.prepare(ratio)
    points: dict[int, dict[Candidate, Timing]] = {}
    ceilings: dict[int, tuple[Timing, str]] = {}

    def probe(outputs: int, some: tuple[Candidate, ...]) -> dict[Candidate, Timing]:
        ceilings[outputs] = laboratory.ceiling(outputs)
        points[outputs] = laboratory.measure(outputs, some)
        best = min(points[outputs], key=lambda each: points[outputs][each].median)
        time_us = points[outputs][best].median
        laboratory.say(
            f"ratio {ratio}, {outputs:,} outputs: {time_us:.2f} us with {best.tile.tag}, "
            f"reading {ceilings[outputs][0].median:.2f} us ({ceilings[outputs][0].median / time_us:.2f})"
        )
        return points[outputs]

    for outputs in output_counts(ratio, laboratory.effort):
        probe(outputs, tuple(found))
    grid = dict(points)
    chosen = choice.segments(grid)
    limits = choice.borders(chosen, probe, laboratory.effort.probes)
    reads = {outputs: read.median for outputs, (read, _) in ceilings.items()}
    return {"points": points, "ceilings": ceilings, "rows": choice.rows(grid, reads, chosen, limits)}


def _nothing_to_tune(what: str) -> None:
    raise RequestError(
        f"kvbuild tune: wanted a GPU target, found {what}, whose kernel has one config and nothing to tune; "
        "name a GPU with --device"
    )


def _check(path: Path, found: dict[int, list[Candidate]]) -> None:
    from ...kernels.contract import COMPRESS_RATIOS

    lacking = [str(ratio) for ratio in COMPRESS_RATIOS if ratio not in found]
    if lacking:
        raise RequestError(
            f"{path}: wanted aligned variants of every ratio, which a table must serve, found none of "
            f"{', '.join(lacking)}; build it with `kvbuild compile --tune-space` and all ratios in build.yaml"
        )


def _source(where: dict[str, Any], quick: bool) -> str:
    tools = ", ".join(f"{name} {version}" for name, version in where["tools"].items())
    versions = where["versions"]
    return (
        f"Timed on one {where['device']} (driver {versions['driver'] or 'unknown'}) on {where['date']} by "
        f"kvbuild tune {versions['kvbuild']}{', quickly' if quick else ''}: replayed graphs over inputs "
        "larger than L2, medians, beside a plain read of the same bytes in the same run. "
        f"Built with {tools}; run with torch {versions['torch']}."
    )


def _json(result: dict[str, Any]) -> dict[str, Any]:
    return {
        "points": [
            {
                "outputs": outputs,
                "ceiling": {**result["ceilings"][outputs][0].to_json(), "by": result["ceilings"][outputs][1]},
                "times": [
                    {"tile": candidate.tile.tag, "variant": candidate.variant, **timing.to_json()}
                    for candidate, timing in sorted(times.items(), key=lambda each: each[1].median)
                ],
            }
            for outputs, times in sorted(result["points"].items())
        ],
        "rows": [
            {"max_outputs": row.max_outputs, "tile": row.candidate.tile.to_json(), "reason": row.reason}
            for row in result["rows"]
        ],
    }


def _show(table: Path, target: str, results: dict[int, dict[str, Any]]) -> None:
    def cells(ratio: int, row: Row) -> tuple[object, ...]:
        limit = "any" if row.max_outputs is None else f"{row.max_outputs:,}"
        return ratio, limit, row.candidate.tile.tag, row.reason

    lines = [cells(ratio, row) for ratio, result in results.items() for row in result["rows"]]
    click.echo(output.table(("ratio", "outputs up to", "tile", "reason"), lines, ("ratio", "outputs up to")))
    click.echo(f"{table}: written; to ship it: kvbuild compile --target {target} --tuning {table}")
