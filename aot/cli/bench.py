"""`kvbuild bench`: the operator beside others that compute the same, in one run, as a table and a plot."""

from __future__ import annotations

import json
import math
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RequestError, ToolchainError
from . import output

if TYPE_CHECKING:
    from ..measure.place import Place
    from ..measure.versus import Row

DEFAULT_FOLDER = Path("artifacts") / "bench"
TORCH_PIP = "pip install torch"
PLOT_PIP = "pip install 'kvbuild[bench]'"


HELP = (
    "Time the operator on this machine beside PyTorch, Triton's JIT and a plain read of the same bytes: "
    "the 12 workloads, decode steps, and the host's cost of a call."
)


@click.command("bench", help=HELP)
@click.argument("file", default=str(output.DEFAULT_BUNDLE))
@click.option(
    "--device", metavar="D", help="Where to run: cpu, cuda:0, ... (default: this process's device)."
)
@click.option("--quick", is_flag=True, help="The smallest workloads and one ratio of decode steps.")
@click.option(
    "-o", "--output", "destination", default=str(DEFAULT_FOLDER), show_default=True, metavar="FOLDER",
    help="Where bench.json, bench.png and bench.svg go; it is made if it is not there.",
)  # fmt: skip
@output.json_option
def command(file: str, device: str | None, quick: bool, destination: str, as_json: bool) -> int:
    path = output.existing_bundle(file)
    output.device_name(device)
    folder = _folder(destination)
    output.require("torch", "kvbuild bench", TORCH_PIP)

    import torch

    from ... import runtime
    from ...runtime.bundle import open_bundle
    from ..measure import hostcost, provenance
    from ..measure.place import Place
    from ..measure.versus import Effort, Versus
    from ..publish import publish

    with runtime.load(path, device=device) as operator:
        place = Place(torch.device(operator.device))
        _prepare(place)
        say = (lambda text: click.echo(text, err=True)) if as_json else click.echo
        where = provenance.record(operator, place)
        say(f"{path}: {operator.target.name} on {place.name}")
        versus = Versus(operator, place, Effort(quick), say)
        if not place.is_gpu:
            say(f"not measured here: {_on_gpus_alone()}, which are timed as replays of a GPU's graph")
        if versus.no_reader:
            say(f"the read ceiling is torch.sum's alone: {versus.no_reader}")
        rows = [versus.row(workload) for workload in versus.effort.workloads()]
        with open_bundle(path) as bundle:
            host = hostcost.measure(versus, bundle.read)
    found = {
        "bundle": str(path),
        "quick": quick,
        **where,
        "rows": [row.to_json() for row in rows],
        "host": host,
        "summary": summarise(rows),
    }
    publish(folder / "bench.json", "results", [(json.dumps(found, indent=1) + "\n").encode()])
    drawn = _draw(folder, found, say)
    if as_json:
        output.emit_json(found)
    else:
        _show(found)
        click.echo(f"{folder / 'bench.json'}{drawn}: written")
    wrong = [
        f"{row.workload.name}: {count} wrong bytes by {name}"
        for row in rows
        for name, count in row.wrong.items()
        if count
    ]
    for text in wrong:
        click.echo(f"kvbuild: {text}", err=True)
    return output.EXIT_FAILED if wrong else output.EXIT_DONE


def _on_gpus_alone() -> str:
    from ..measure.versus import CALLERS, HOST_CALLERS

    *names, last = (name for name in CALLERS if name not in HOST_CALLERS)
    return f"{', '.join(names)} and {last}"


def _folder(name: str) -> Path:
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"-o {name}: wanted a folder, or a place for one, found: {reason}") from None
    output.writable_file(folder / "bench.json")
    return folder


def _prepare(place: Place) -> None:
    import torch

    if place.is_gpu:
        if not torch.cuda.is_available():
            raise ToolchainError(
                f"kvbuild bench on {place.device} needs a torch that can use it, found that "
                f"{torch.__version__} sees no GPU; install torch for this GPU, or name --device cpu"
            )
        torch.cuda.set_device(place.device)
        return
    # As many as the host kernel takes, so that both have the same cores.
    limit = os.environ.get("KVBUILD_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(min(cores, int(limit)) if limit.isdigit() and int(limit) else cores)


def summarise(rows: list[Row]) -> dict[str, Any]:
    """Geometric means by kind of workload: of the read ceiling, and of each caller over the operator."""
    from ..measure.versus import OURS

    found: dict[str, Any] = {}
    for kind in ("prefill", "decode"):
        chosen = [row for row in rows if row.workload.name.startswith(kind)]
        callers = list(dict.fromkeys(name for row in chosen for name in row.times))
        found[kind] = {
            "of_ceiling": _mean([row.ceiling.median / row.times[OURS].median for row in chosen]),
            "times_kvbuild": {
                name: _mean(
                    [row.times[name].median / row.times[OURS].median for row in chosen if name in row.times]
                )
                for name in callers
                if name != OURS
            },
        }
    return found


def _mean(values: list[float]) -> float:
    return round(math.exp(statistics.fmean(math.log(value) for value in values)), 4)


def _draw(folder: Path, found: dict[str, Any], say: Any) -> str:
    from ..publish import publish

    try:
        import matplotlib  # noqa: F401
    except ImportError:
        say(f"no plot was drawn, for matplotlib is not installed here; get it with: {PLOT_PIP}")
        return ""
    from ..plot import draw

    for suffix, data in draw(found).items():
        publish(folder / f"bench.{suffix}", "plot", [data])
    return ", .png and .svg"


def _show(found: dict[str, Any]) -> None:
    callers = list(dict.fromkeys(name for row in found["rows"] for name in row["callers"]))
    head = ("workload", "MiB", "reading us", *(f"{name} us" for name in callers), "reading/kvbuild")
    lines = []
    for row in found["rows"]:
        times = [row["callers"].get(name) for name in callers]
        lines.append(
            (
                row["name"],
                f"{row['bytes'] / (1 << 20):g}",
                f"{row['ceiling']['median']:,.1f}",
                *(f"{each['median']:,.1f}" if each else "-" for each in times),
                f"{row['callers']['kvbuild']['of_ceiling']:.2f}",
            )
        )
    click.echo(output.table(head, lines, head[1:]))
    host = found["host"]
    costs = [(name, f"{each['batch']:,.2f}") for name, each in host["callers"].items()]
    click.echo(f"\nus of the calling thread, a call of {host['outputs']} outputs")
    click.echo(output.table(("caller", "us"), costs, ("us",)))
    click.echo("")
    reasons = {name: reason for row in found["rows"] for name, reason in row["not_measured"].items()}
    for name, reason in {**reasons, **host["not_measured"]}.items():
        click.echo(f"not measured: {name}: {reason}")
    for kind, each in found["summary"].items():
        others = ", ".join(f"{name} {ratio:.1f}x" for name, ratio in each["times_kvbuild"].items())
        text = f"reading/kvbuild {each['of_ceiling']:.2f}; time/kvbuild: {others}"
        click.echo(f"{kind}, geometric means: {text}")
