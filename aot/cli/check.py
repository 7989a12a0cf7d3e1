"""`kvbuild check`: runs the operator on this machine and compares its bytes with the oracle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from ..errors import RequestError
from . import output

if TYPE_CHECKING:
    from .cases import Case, Result

TORCH_PIP = "pip install torch"
NPU_PIP = "pip install torch torch_npu (of one release, the one that belongs to this host's CANN)"


@click.command("check", help="Run the operator on this machine and compare its bytes with the oracle.")
@click.argument("file")
@click.option(
    "--device", metavar="D", help="Where to run: cpu, cuda:0, ... (default: this process's device)."
)
@click.option("--all", "everything", is_flag=True, help="Run all 12 benchmark workloads, not the smallest.")
@click.option("--workload", "names", multiple=True, metavar="NAME", help="Run only this case; repeatable.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, metavar="N",
              help="Seed of the random operands.")  # fmt: skip
@output.json_option
def command(
    file: str, device: str | None, everything: bool, names: tuple[str, ...], seed: int, as_json: bool
) -> int:
    path = output.existing_bundle(file)
    output.device_name(device)
    npu = (device or "").startswith("npu")
    output.require("torch", "kvbuild check", NPU_PIP if npu else TORCH_PIP)
    if npu:
        output.require("torch_npu", "kvbuild check on an NPU", NPU_PIP)

    import torch

    from ... import runtime
    from . import cases

    chosen = _choose(cases.cases(everything or bool(names)), names)
    operator = runtime.load(path, device=device)
    where = torch.device(operator.device)
    if not as_json:
        click.echo(f"{path}: {operator.target.name} on {cases.device_text(where)}")
        click.echo(_line(_HEAD))
    results = []
    for case in chosen:
        result = cases.run(operator, case, where, seed)
        results.append(result)
        if not as_json:
            click.echo(_line(_cells(result)))
            for fault in result.faults:
                click.echo(f"    {fault}")
    summary = cases.summarise(results)
    if as_json:
        output.emit_json(
            {
                "bundle": str(path),
                "target": operator.target.name,
                "device": str(where),
                "seed": seed,
                "cases": [result.to_json() for result in results],
                **summary,
                "counters": operator.counters(),
            }
        )
    else:
        click.echo(_closing(summary))
    return output.EXIT_DONE if summary["ok"] else output.EXIT_FAILED


def _choose(known: tuple[Case, ...], names: Iterable[str]) -> tuple[Case, ...]:
    by_name = {case.name: case for case in known}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise RequestError(
            f"--workload {unknown[0]}: wanted one of {', '.join(by_name)}; found no case of that name"
        )
    return tuple(by_name[name] for name in names) or known


_HEAD = ("case", "outputs", "bytes", "differing", "wrong", "untouched", "rerun", "verdict")
_WIDTHS = (29, 7, 11, 9, 7, 9, 6, 7)


def _line(cells: tuple[str, ...]) -> str:
    first, *rest = (
        cell.ljust(width) if at == 0 else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, _WIDTHS, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()


def _cells(result: Result) -> tuple[str, ...]:
    verdict = output.paint("ok".rjust(7), "green") if result.ok else output.paint("WRONG".rjust(7), "red")
    return (
        result.name,
        f"{result.outputs:,}",
        f"{result.bytes_compared:,}",
        f"{result.differing:,}",
        f"{result.wrong:,}",
        "same" if result.untouched_changed == 0 else f"{result.untouched_changed:,}",
        "same" if result.rerun_equal else "differs",
        verdict,
    )


def _closing(summary: dict[str, Any]) -> str:
    lines = [
        f"{summary['bytes_compared']:,} bytes compared, {summary['differing']:,} differing, of which "
        f"{summary['ties']:,} are accepted rounding ties and {summary['wrong']:,} are wrong; "
        f"the float32 PyTorch reference differs in {summary['reference_ties']:,} on the prefills alone"
    ]
    lines += [f"too many {refusal}" for refusal in summary["tie_refusals"]]
    failed = summary["failed"]
    if summary["ok"] and not summary["bytes_compared"]:
        # It still counts that nothing was written.
        lines.append("nothing was written, and nothing was compared: no case that was run has an output")
        return "\n".join(lines)
    lines.append(
        output.paint("all cases right", "green") if summary["ok"]
        else output.paint(f"wrong: {', '.join(failed) or 'ties'}", "red")
    )  # fmt: skip
    return "\n".join(lines)
