"""Compiles the plain Triton kernels with every Triton that the registry has, to cubins, and reads back from
each how many hidden pointers its kernel takes. Vendors' Tritons are made from these.

    python tests/tritons/matrix.py [VERSION ...]

Installs each version under the cache folder on first use (about 0.6 GB each). Exit 1 where a version cannot
be installed, a kernel does not compile, or a binary takes other parameters than expected. Nothing is run.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbuild.aot import assemble, spec, targets, toolchain, tuning
from kvbuild.aot import plan as planning
from kvbuild.aot.build import read_source
from kvbuild.aot.plan import Plan
from kvbuild.aot.pool import Compiled, Failed, Pool
from kvbuild.kernels.contract import COMPRESS_RATIOS
from kvbuild.kernels.gpgpu.route import Tile

sys.path.insert(0, str(Path(__file__).parent))
import environments

ARCHS = ("sm_80", "sm_90")
# One tile for each way that compress.py's kernels divide an output: not at all, its dimensions, its rows.
TILES = (Tile(4, 512, 1, 4, 2), Tile(4, 64, 1, 1, 1), Tile(4, 512, 8, 4, 3), Tile(4, 256, 2, 2, 1))
# What the facts about each version say; the binaries must bear it out.
HIDDEN = {"3.0": 0, "3.1": 0, "3.2": 0, "3.3": 1, "3.4": 1, "3.5": 2, "3.6": 2, "3.9": 2}


@dataclass(frozen=True)
class Outcome:
    """One kernel compiled by one Triton. error: "" where all is as expected."""

    function: str
    hidden: int | None
    error: str


def tiles() -> tuple[Tile, ...]:
    """TILES and each tile that a tuning table chooses for an arch whose Triton is its vendor's own."""
    chosen = [
        row.tile
        for vendor in targets.names()
        if targets.load(vendor).SDK and targets.load(vendor).ROUTE == "gpgpu"
        for arch in targets.load(vendor).ARCHS
        for rows in tuning.load(vendor, arch).rows.values()
        for row in rows
        if row.tile.form == "block"
    ]
    return tuple(dict.fromkeys((*TILES, *chosen)))


def plan_for(found: toolchain.Toolchain, chosen: Sequence[Tile]) -> Plan:
    """Every kernel of the tiles: both layouts, all ratios, both archs."""
    keys = ("block_t", "block_d", "split", "num_warps", "num_stages")
    rows = [
        {"max_outputs": i, **{key: getattr(tile, key) for key in keys}}
        for i, tile in enumerate(chosen, start=1)
    ]
    rows[-1]["max_outputs"] = None
    lines = "".join(
        "        - {"
        + ", ".join(f"{key}: {'null' if value is None else value}" for key, value in row.items())
        + "}\n"
        for row in rows
    )
    text = (
        f"version: 1\ncompress_ratios: {list(COMPRESS_RATIOS)}\nstate_block_sizes: [8, any]\n"
        "hosts: [x86_64-linux-gnu.2.17]\nnumerics: {fp_fusion: false}\ntargets:\n  nvidia:\n"
        f"    archs: [{', '.join(ARCHS)}]\n    tiles:\n"
        + "".join(f"      {arch}:\n{lines}" for arch in ARCHS)
    )
    read = spec.parse(text, "the matrix")
    facts = planning.Facts(
        tables={},
        versions={"nvidia": found.versions},
        commands={"nvidia": found.command},
        zig="none",
        cpu_sources=(),
        read=read_source,
        recipe=hashlib.sha256(toolchain.WORKER.read_bytes()).hexdigest(),
    )
    return planning.plan(read, spec.wanted_targets(read, ["nvidia"]), facts)


def expected_hidden(version: str) -> int:
    """Hidden pointers behind a kernel's parameters, by the minor version. KeyError for one without facts."""
    return HIDDEN[".".join(version.split(".")[:2])]


def judge(outcome: Compiled | Failed, hidden: int) -> Outcome:
    """Whether a unit came out as a binary that a launcher could launch, with that many hidden pointers."""
    unit = outcome.unit
    where = f"{unit.arch} {unit.function} {dict(unit.constexprs)}"
    if isinstance(outcome, Failed):
        return Outcome(unit.function, None, f"{where}: {outcome.error.strip()}")
    try:
        artifact = assemble.check(outcome)
    except ValueError as error:
        return Outcome(unit.function, None, f"{where}: {error}")
    wrong = (
        ""
        if artifact.hidden == hidden
        else f"{where}: wanted {hidden} hidden pointers, found {artifact.hidden}"
    )
    return Outcome(unit.function, artifact.hidden, wrong)


def compiled(version: str, root: Path, chosen: Sequence[Tile], jobs: int) -> Iterator[Outcome]:
    """The outcome of each unit with this Triton; nothing comes from a cache. InstallError, ToolchainError."""
    python = environments.environment(version, root)
    found = toolchain.probe("nvidia", {"nvidia": (str(python),)}, os.environ).require()
    plan = plan_for(found, chosen)
    for outcome in Pool(plan.commands, plan.sources, jobs, os.environ).run(plan.units):
        yield judge(outcome, expected_hidden(version))


def row(version: str, outcomes: Sequence[Outcome], seconds: float) -> str:
    """One line of the table."""
    right = sum(not outcome.error for outcome in outcomes)
    hidden = " ".join(str(each) for each in sorted({o.hidden for o in outcomes if o.hidden is not None}))
    verdict = "ok" if outcomes and right == len(outcomes) else "FAILED"
    return f"{version:8} {right:4} of {len(outcomes):4} {hidden or '-':>6} {seconds:8.0f} s  {verdict}"


def main(versions: Sequence[str]) -> int:
    unknown = [version for version in versions if version not in environments.VERSIONS]
    if unknown:
        print(f"wanted versions of {', '.join(environments.VERSIONS)}, found {unknown[0]}", file=sys.stderr)
        return 2
    root, chosen, errors = environments.folder(), tiles(), []
    print(f"{len(chosen)} tiles, ratios {COMPRESS_RATIOS}, {' and '.join(ARCHS)}, environments in {root}")
    print(f"{'triton':8} {'kernels':>12} {'hidden':>6} {'time':>10}")
    for version in versions or environments.VERSIONS:
        started = time.monotonic()
        outcomes: list[Outcome] = []
        try:
            outcomes.extend(compiled(version, root, chosen, os.cpu_count() or 1))
        except (environments.InstallError, toolchain.ToolchainError) as error:
            outcomes.append(Outcome("", None, f"cannot be installed: {error}"))
        if not outcomes:
            outcomes.append(Outcome("", None, "no kernel was compiled"))
        print(row(version, outcomes, time.monotonic() - started), flush=True)
        errors += [f"triton {version}: {outcome.error}" for outcome in outcomes if outcome.error]
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
