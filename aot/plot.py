"""The recorded benchmark as a picture. Needs matplotlib, of the extra `bench`."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def draw(found: Mapping[str, Any]) -> dict[str, bytes]:
    """PNG and SVG by suffix: the fraction of the read ceiling by workload, and the host's cost by caller.

    found: what `kvbuild bench --json` prints. The same numbers give the same SVG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "kvbuild", "font.size": 9})
    rows = found["rows"]
    callers = list(dict.fromkeys(name for row in rows for name in row["callers"]))
    costs = {name: each["batch"] for name, each in found["host"]["callers"].items()}
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 1.5 + 0.28 * len(rows)), width_ratios=(3, 2), layout="constrained"
    )
    for caller, marker in zip(callers, _cycle(len(callers)), strict=True):
        times = [(at, row["callers"].get(caller)) for at, row in enumerate(rows)]
        points = [(each["of_ceiling"], at) for at, each in times if each is not None]
        left.plot(*zip(*points, strict=True), marker, linestyle="", label=caller)
    left.axvline(1.0, color="grey", linewidth=0.8)
    left.set_yticks(range(len(rows)), [row["name"] for row in rows])
    left.invert_yaxis()
    left.set_xlim(left=0.0)
    left.set_xlabel("fraction of a plain read of the same bytes (1 is as fast as the memory)")
    left.grid(axis="x", alpha=0.3)
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    names = sorted(costs, key=lambda name: costs[name])
    bars = right.barh(names, [costs[name] for name in names])
    right.bar_label(bars, fmt="%.2f", padding=3)
    right.invert_yaxis()
    right.set_xscale("log")
    right.margins(x=0.25)
    right.set_xlabel(f"us of the calling thread a call, {found['host']['outputs']} outputs")
    figure.suptitle(f"{found['target']} on {found['device']}, {found['date'][:10]}")
    try:
        return {suffix: _saved(figure, suffix) for suffix in ("png", "svg")}
    finally:
        pyplot.close(figure)


def _cycle(count: int) -> list[str]:
    return [_MARKERS[at % len(_MARKERS)] for at in range(count)]


def _saved(figure: Any, suffix: str) -> bytes:
    data = io.BytesIO()
    metadata = {"Date": None} if suffix == "svg" else {"Software": None}
    figure.savefig(data, format=suffix, dpi=150, metadata=metadata)
    return data.getvalue()
