"""The record as tables: one page in Markdown, and a few lines for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .record import FAILED, NOT_RUN, PASSED, Check, Record

HEAD = ("launch", "outputs", "MiB", "sets", "us", "reading", "reading/us", "eager", "PyTorch", "PyTorch/us")


def short(record: Record, facts: dict[str, Any]) -> list[str]:
    """The outcome by section, the times, and whatever failed."""
    lines = _aligned(("section", PASSED, FAILED, NOT_RUN, "seconds"), _sections(record))
    rows = record.times.get("rows", [])
    if rows:
        lines += ["", *_aligned(HEAD, [_cells(row) for row in rows])]
        lines += [_summary_line(kind, each) for kind, each in record.times["summary"].items()]
    lines += ["", *_start_lines(record)]
    for check in record.failed:
        lines.append(f"FAILED  {check.section}: {check.name}: {check.detail}"[:400])
    outcome = f"{len(record.failed)} failed" if record.failed else "all passed"
    where = f"{facts['bundle']['target']} on {facts['device']['name']}"
    lines.append(f"{where}: {len(record.checks)} checks, {outcome}")
    return lines


def markdown(record: Record, facts: dict[str, Any]) -> str:
    """The whole page."""
    versions = ", ".join(f"{name} {value}" for name, value in facts["versions"].items() if value)
    tools = ", ".join(f"{name} {value}" for name, value in facts["bundle"]["toolchain"].items())
    outcome = f"{len(record.failed)} failed" if record.failed else "all passed"
    lines = [
        f"# {facts['bundle']['target']} on {facts['device']['name']}",
        "",
        f"{facts['date']}. {len(record.checks)} checks, {outcome}. Written by `benchmarks/accept.py`.",
        "",
        f"* Bundle {facts['bundle']['name']}, sha256 `{facts['bundle']['sha256']}`, "
        f"manifest `{facts['bundle']['manifest_sha256']}`",
        f"* Built with {tools}; sources `{facts['bundle']['source_digest']}`",
        f"* Run with {versions}",
        "",
    ]
    rows = record.times.get("rows", [])
    if rows:
        lines += _speed_section(record, rows)
    start = _start_lines(record)
    if start:
        lines += ["## Start and calls", "", *(f"* {line}" for line in start), ""]
    checks = [(f"{check.section}: {check.name}", _outcome(check), f"{check.seconds:.2f}",
               check.detail.replace("|", "/").replace("\n", " ")) for check in record.checks]
    lines += ["## Checks", "", *_table(("check", "outcome", "seconds", "what was seen"), checks), ""]
    return "\n".join(lines)


def _speed_section(record: Record, rows: Sequence[dict[str, Any]]) -> list[str]:
    return [
        "## Device time", "",
        "Microseconds a call, medians. `us`: replayed CUDA graphs over `sets` distinct inputs in turn. "
        "`reading`: reading the same bytes in the same way and nothing else, by the best of many plain "
        "kernels. `eager`: calls back to back on a stream. `PyTorch`: the float32 reference, launched "
        "eagerly, until its result is there. Rows marked * fit into L2 together.",
        "",
        *_table(HEAD, [_cells(row) for row in rows]), "",
        *(f"* {_summary_line(kind, each)}" for kind, each in record.times["summary"].items()), "",
    ]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    reference = row["reference"]
    return (
        row["name"] + ("" if row["cold"] else " *"),
        f"{row['outputs']:,}",
        f"{row['bytes'] / (1 << 20):g}",
        str(row["sets"]),
        f"{row['ours']:.2f}",
        f"{row['ceiling']:.2f}",
        f"{row['ceiling_over_ours']:.3f}",
        f"{row['stream']:.2f}",
        "" if reference is None else f"{reference:.0f}",
        "" if reference is None else f"{row['reference_over_ours']:.1f}",
    )


def _summary_line(kind: str, each: dict[str, Any]) -> str:
    text = (f"{kind}, {each['rows']} rows larger than L2: reading/us {each['ceiling_over_ours']:.3f} "
            f"(geometric mean), least {each['slowest']['ceiling_over_ours']:.3f} ({each['slowest']['name']})")
    if "reference_over_ours" in each:
        least = each["least_over_reference"]
        text += (f"; PyTorch/us {each['reference_over_ours']:.1f} (geometric mean), least "
                 f"{least['reference_over_ours']:.1f} ({least['name']})")
    return text


def _start_lines(record: Record) -> list[str]:
    start = record.times.get("start", {})
    lines = []
    for device, times in start.items():
        if device == "call_us":
            continue
        steps = ", ".join(f"{name} {value:.1f}" for name, value in times["median_ms"].items())
        lines.append(f"{device}, fresh process, ms: {steps}; own steps together {times['own_ms']:.0f}")
    calls = start.get("call_us", {})
    if calls:
        lines.append("a call's host time, us: " + ", ".join(
            f"{name} {each['median']:.2f} (in a batch {each['batch']:.2f})" for name, each in calls.items()))
    return lines


def _sections(record: Record) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for section in dict.fromkeys(check.section for check in record.checks):
        checks = [check for check in record.checks if check.section == section]
        counts = [sum(check.status == status for check in checks) for status in (PASSED, FAILED, NOT_RUN)]
        found.append((section, *map(str, counts), f"{sum(check.seconds for check in checks):.1f}"))
    return found


def _outcome(check: Check) -> str:
    return f"**{check.status}**" if check.status == FAILED else check.status


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    return ["  ".join(cell.ljust(width) if at == 0 else cell.rjust(width)
                      for at, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
            for row in (head, *rows)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
