"""The README's support table, from the vendors' target files and the recorded runs: nothing in it is typed by
hand, and no row claims what was not run.

    python benchmarks/support_table.py            prints the table
    python benchmarks/support_table.py --write    puts it into README.md, between its two marks
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbuild.aot import targets

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- made by benchmarks/support_table.py -->"
END = "<!-- end of what it made -->"
HEAD = ("vendor", "archs", "such as", "compiled here", "loaded", "computed", "evidence")

# What the packages of the extra `compile` bring. Whoever needs more needs a vendor's SDK.
FROM_THE_REGISTRY = frozenset({"triton", "ptxas", "zig"})
_CHIPS_SHOWN = 2
STAND_IN = "a stand-in driver"


@dataclass(frozen=True)
class Row:
    """What is known of some archs of one vendor; each field but the first two is a phrase."""

    vendor: str
    archs: tuple[str, ...]
    compiled: str
    loaded: str
    computed: str
    evidence: str


def recorded(folder: Path = RESULTS) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The recorded runs on hardware by (vendor, arch), each {"file", "device", "gpus", "passed", "checks"}"""
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if "checks" not in record:
            continue  # a comparison of speeds: it says nothing of what was right
        facts, statuses = record["device"]["facts"], [check["status"] for check in record["checks"]]
        found[facts["vendor"], facts["arch"].split(":")[0]].append(
            {
                "file": path.name,
                "device": record["device"]["name"],
                "gpus": record["device"]["gpus"],
                "passed": statuses.count("passed"),
                "checks": statuses.count("passed") + statuses.count("failed"),
            }
        )
    return dict(found)


def rows(runs: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> list[Row]:
    """One row for the archs of a vendor of which the same can be said."""
    made: list[Row] = []
    for vendor in targets.names():
        for arch in targets.load(vendor).ARCHS:
            row = _row(vendor, arch, runs.get((vendor, arch), ()))
            same = [each for each in made if replace(each, archs=()) == replace(row, archs=())]
            if same:
                made[made.index(same[0])] = replace(same[0], archs=(*same[0].archs, arch))
            else:
                made.append(row)
    return made


def _row(vendor: str, arch: str, runs: Sequence[Mapping[str, Any]]) -> Row:
    module = targets.load(vendor)
    if module.ROUTE == "cpu":
        if arch == "x86_64":
            return Row(vendor, (arch,), "yes", "yes", "yes", "`make test`: every byte against the oracle")
        how = "under qemu, where that is installed"
        return Row(vendor, (arch,), "yes", how, how, "`make test`: the bytes of x86_64")
    said = module.toolchain(arch, defaultdict(lambda: "0.0")).get("evidence", "")
    if set(module.needs(arch)) <= FROM_THE_REGISTRY:
        compiled = f"yes, to {module.BINARY}"
    elif module.ROUTE == "staged":
        compiled = "as far as HIVM; `kvbuild finish` does the rest, with the vendor's tool"
    else:
        compiled = f"no: it takes {module.SDK}"
    loaded, computed = STAND_IN, "no"
    if compiled.startswith("no"):
        evidence = "`make test`: launches recorded; no binary of its compiler was ever seen"
    else:
        evidence = said or "`make test`: binaries read back, launches recorded"
    if runs:
        devices = dict.fromkeys(run["device"] for run in runs)
        loaded = ", ".join(devices)
        computed = ", ".join(
            f"{run['passed']} of {run['checks']} checks passed on {_count(run['gpus'], 'GPU')}"
            for run in runs
        )
        names = [run["file"].removesuffix(".json") for run in runs]
        evidence = ", ".join(f"[{name}](benchmarks/results/{name}.md)" for name in names)
    return Row(vendor, (arch,), compiled, loaded, computed, evidence)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def table(made: Iterable[Row]) -> str:
    """The rows as Markdown, with the marks around them."""
    lines = [BEGIN, f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    for row in made:
        chips = ", ".join(chip for arch in row.archs for chip in _chips(row.vendor, arch))
        cells = row.vendor, " ".join(row.archs), chips, row.compiled, row.loaded, row.computed, row.evidence
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, END])


def _chips(vendor: str, arch: str) -> tuple[str, ...]:
    return targets.load(vendor).CHIPS.get(arch, ())[:_CHIPS_SHOWN]


def written(text: str, made: str) -> str:
    """`text` with what stands between the marks replaced. ValueError where it has no such marks."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise ValueError(f"wanted the marks {BEGIN} and {END}, in that order, found none; put them back")
    return text[:begin] + made + text[end + len(END) :]


def main(arguments: Sequence[str]) -> int:
    made = table(rows(recorded()))
    if list(arguments) == ["--write"]:
        readme = ROOT / "README.md"
        readme.write_text(written(readme.read_text(encoding="utf-8"), made), encoding="utf-8")
    elif not arguments:
        print(made)
    else:
        print(f"wanted --write or nothing, found {' '.join(arguments)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
