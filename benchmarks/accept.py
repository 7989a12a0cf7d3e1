"""Accepts a bundle on the machine that it is for: every byte, every way of calling it, and its times.

    python benchmarks/accept.py BUNDLE [--device cuda:0] [--out FOLDER] [--quick] [--only checks|times]

Needs torch and the installed kvbuild wheel, no compiler and no Triton: Triton is hidden from the process.
Writes FOLDER/accept.json (every number) and FOLDER/accept.md (tables), prints a short table last, and exits
1 if anything failed, 2 if the request was wrong. `--device cpu` runs what makes sense there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acceptance import isolation

if TYPE_CHECKING:
    from acceptance.record import Record

    from kvbuild.aot.measure.place import Place


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    if not options.bundle.is_file():
        print(f"BUNDLE: wanted a .kvb file, found none at {options.bundle}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    watched = isolation.install()
    try:
        return _accept(options, watched)
    finally:
        shutil.rmtree(watched.cache, ignore_errors=True)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="accept.py", description="Accepts a bundle where it is to run.")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--device", default="cuda:0", help="cuda:0, cuda:1, ... or cpu (default: cuda:0)")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="FOLDER", help="where the files go")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller launches")
    parser.add_argument("--only", choices=("checks", "times"), help="one half of it")
    return parser.parse_args(arguments)


def _accept(options: argparse.Namespace, watched: isolation.Isolation) -> int:
    import torch
    from acceptance.record import Record

    from kvbuild import runtime
    from kvbuild.aot.measure.place import Place

    if options.device != "cpu" and not torch.cuda.is_available():
        print(f"--device {options.device}: wanted a GPU that torch can use, found none; "
              "--device cpu runs what makes sense without one", file=sys.stderr)
        return 2
    record = Record()
    try:
        operator = runtime.load(options.bundle, device=options.device)
    except (runtime.KvbuildError, ValueError) as refusal:
        print(refusal, file=sys.stderr)
        return 2
    place = Place(torch.device(operator.device))
    if place.is_gpu:
        torch.cuda.set_device(place.device)
    facts = _facts(options, operator, place)
    record.say(f"{operator.target.name} on {place.name}, torch {torch.__version__}")
    if options.only != "times":
        _checks(record, operator, place, options)
    if options.only != "checks":
        _times(record, operator, place, options, watched)
    _isolated(record, watched, options.only == "checks")
    facts["counters"] = operator.counters()
    _write(options.out, record, facts)
    print()
    for line in _short(record, facts):
        print(line)
    return 1 if record.failed else 0


def _checks(record: Record, operator: Any, place: Place, options: argparse.Namespace) -> None:
    from acceptance import callers, exact, graphs, parallel, refusals

    # First of all: nothing has called the operator yet.
    graphs.first_call(record, operator, place)
    exact.run(record, operator, place, options.quick)
    graphs.run(record, operator, place)
    parallel.run(record, operator, place, options.bundle, options.quick)
    refusals.run(record, operator, place)
    callers.check(record, operator, place)
    _host(record, place, options)


def _host(record: Record, place: Place, options: argparse.Namespace) -> None:
    """The cpu target of the same bundle on this host."""
    import torch
    from acceptance import parallel, refusals, start
    from acceptance.record import NotRun

    from kvbuild import runtime
    from kvbuild.aot.cli import cases
    from kvbuild.aot.measure.place import Place

    if not place.is_gpu:
        return
    with record.check("this host's cpu", "the smallest workloads, decode steps and odd launches") as check:
        if not start.has_cpu_target(options.bundle):
            raise NotRun("the bundle has no cpu target for this host")
        host = Place(torch.device("cpu"))
        operator = runtime.load(options.bundle, device="cpu")
        chosen = cases.cases(False)[:: 6 if options.quick else 1]
        results = [cases.run(operator, case, host.device) for case in chosen]
        summary = cases.summarise(results)
        check.numbers.update(summary)
        faults = [f"{result.name}: {fault}" for result in results for fault in result.faults]
        check.expect(summary["ok"], "; ".join([*summary["tie_refusals"], *faults[:8]]))
        check.detail = f"{len(results)} launches, {summary['bytes_compared']:,} bytes compared"
    if check.status != "passed":
        return
    with record.check("this host's cpu", "a forked child") as check:
        check.detail = parallel.fork(operator, host)
    refusals.run(record, operator, host, section="this host's cpu")


def _times(record: Record, operator: Any, place: Place, options: argparse.Namespace,
           watched: isolation.Isolation) -> None:
    from acceptance import callers, speed, start

    start.run(record, operator, place, options.bundle, options.quick)
    callers.times(record, operator, place, options.bundle)
    # Before the kernels that only read are compiled.
    _nothing_compiled(record, watched)
    speed.run(record, operator, place, options.quick)


def _nothing_compiled(record: Record, watched: isolation.Isolation) -> None:
    with record.check("isolation", "nothing was compiled") as check:
        check["compiled by the driver"] = watched.compiled_by_driver()
        check["programs"] = len(watched.programs)
        check["triton"] = isolation.triton_modules()
        check.expect(watched.compiled_by_driver() == 0, "the driver compiled kernels")
        foreign = watched.foreign_programs()
        check.expect(not foreign, f"programs other than this Python were started: {', '.join(foreign)}")
        check.detail = "0 kernels compiled by the driver, 0 programs started but this Python"


def _isolated(record: Record, watched: isolation.Isolation, checks_only: bool) -> None:
    if checks_only:
        _nothing_compiled(record, watched)
    with record.check("isolation", "Triton was not imported") as check:
        found = isolation.triton_modules()
        check.expect(not found, f"found {', '.join(found)}")


def _facts(options: argparse.Namespace, operator: Any, place: Place) -> dict[str, Any]:
    import torch

    from kvbuild.aot.measure import provenance
    from kvbuild.runtime.bundle import open_bundle

    with open_bundle(options.bundle) as bundle:
        manifest = bundle.digest
    content = hashlib.sha256(options.bundle.read_bytes()).hexdigest()
    target = operator.target
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "device": {"name": place.name, "as": str(place.device), "facts": operator.facts.to_json(),
                   "gpus": torch.cuda.device_count() if place.is_gpu else 0},
        "bundle": {"name": options.bundle.name, "sha256": content, "manifest_sha256": manifest,
                   "target": target.name, "source_digest": target.source_digest,
                   "toolchain": dict(target.tools),
                   "variants": [each.name for each in operator.variants]},
        "versions": provenance.versions(),
        "options": {"quick": options.quick, "only": options.only},
    }


def _write(folder: Path, record: Record, facts: dict[str, Any]) -> None:
    from acceptance import report

    whole = {**facts, "failed": [f"{check.section}: {check.name}" for check in record.failed],
             "checks": [check.to_json() for check in record.checks], "times": record.times}
    (folder / "accept.json").write_text(json.dumps(whole, indent=1, default=str) + "\n")
    (folder / "accept.md").write_text(report.markdown(record, facts))


def _short(record: Record, facts: dict[str, Any]) -> list[str]:
    from acceptance import report

    return report.short(record, facts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
