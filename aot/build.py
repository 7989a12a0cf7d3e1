"""Runs a plan: units from the cache or from workers, launchers, and the manifest of what came out."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import kernels
from ..kernels.contract import SPECIALISED_BLOCK_SIZE
from ..runtime.manifest import Manifest, Target
from . import launcher, targets, toolchain, tuning
from .assemble import Artifact, assemble, check
from .cache import Cache, Entry
from .errors import BuilderError, RequestError, ToolchainError
from .plan import Facts, Plan, Unit, digest, plan
from .pool import Compiled, Failed, Pool, checked_answer
from .progress import Reporter, Silent
from .spec import Spec, TargetName, wanted_targets
from .tuning import Table

KERNELS = Path(next(iter(kernels.__path__)))


@dataclass(frozen=True)
class Failure:
    """Something that could not be made, and why, in the compiler's words where it had any."""

    name: str
    error: str


@dataclass(frozen=True)
class Report:
    """Counts and seconds of one build. dropped: what `keep_going` left out, each with its reason."""

    units_compiled: int
    units_cached: int
    launchers_compiled: int
    launchers_cached: int
    seconds: float
    failures: tuple[Failure, ...]
    dropped: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "units": {"compiled": self.units_compiled, "cached": self.units_cached},
            "launchers": {"compiled": self.launchers_compiled, "cached": self.launchers_cached},
            "seconds": round(self.seconds, 3),
            "failures": [{"name": each.name, "error": each.error} for each in self.failures],
            "dropped": list(self.dropped),
        }


@dataclass(frozen=True)
class BuildResult:
    """manifest: what bundle.write takes with `blobs`; None where no bundle may be written."""

    manifest: Manifest | None
    blobs: Mapping[str, bytes]
    report: Report

    @property
    def ok(self) -> bool:
        """Whether everything that was planned was made."""
        return not self.report.failures


def prepare(
    spec: Spec,
    names: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    runner: toolchain.Run = toolchain.run,
    *,
    tune_space: bool = False,
    own_tables: Sequence[Path] = (),
) -> Plan:
    """The plan for targets as people write them (VENDOR or VENDOR:ARCH); reads sources, tables, versions.

    tune_space: with the candidates of the tuning space (see plan.plan). own_tables: files of tuning tables
    that take the place of the packaged ones, each for the target it names.
    Raises RequestError for an unknown target or a wrong tuning table, then ToolchainError for what lacks.
    """
    wanted = wanted_targets(spec, names)
    untuned = sorted({name.vendor for name in wanted if targets.load(name.vendor).ROUTE == "staged"})
    if tune_space and untuned:
        raise RequestError(
            f"--tune-space: wanted targets that have a tuning space, found {', '.join(untuned)}, which has "
            f"none (its tiles are the routes of {spec.file}); build it without the option"
        )
    if tune_space and SPECIALISED_BLOCK_SIZE not in spec.state_block_sizes:
        raise RequestError(
            f"--tune-space: wanted {SPECIALISED_BLOCK_SIZE} among the state_block_sizes of {spec.file}, for "
            f"candidates are built for it, found {', '.join(map(str, spec.state_block_sizes))}; add it"
        )
    tables = _tables(spec, wanted, own_tables)
    archs: dict[str, list[str]] = {}
    for name in wanted:
        archs.setdefault(name.vendor, []).append(name.arch)
    found = {
        vendor: toolchain.probe(vendor, spec.toolchains, environ, runner, archs[vendor])
        for vendor in sorted(archs)
    }
    missing = [text for each in found.values() for text in each.missing]
    ready = _ready(wanted, found)
    try:
        zig = toolchain.zig_version()
    except ToolchainError as error:
        missing.append(str(error))
        ready = []  # zig compiles every target's launcher
    if missing:
        missing += [*ready, *toolchain.unread_variables(environ)]
        raise ToolchainError("\n".join(dict.fromkeys(missing)))
    host_kernel = (path for path in (KERNELS / "cpu").iterdir() if path.suffix in (".c", ".h"))
    return plan(
        spec,
        wanted,
        Facts(
            tables=tables,
            versions={vendor: each.versions for vendor, each in found.items()},
            commands={vendor: each.command for vendor, each in found.items()},
            zig=zig,
            cpu_sources=sorted(f"cpu/{path.name}" for path in host_kernel),
            read=read_source,
            recipe=hashlib.sha256(toolchain.WORKER.read_bytes()).hexdigest(),
            trees={vendor: each.tree for vendor, each in found.items() if each.tree},
        ),
        tune_space=tune_space,
    )


def _ready(wanted: Sequence[TargetName], found: Mapping[str, toolchain.Toolchain]) -> list[str]:
    """A line about those of the wanted targets whose tools are all there; none where there are none."""
    ready = [
        str(name)
        for name in wanted
        if set(targets.load(name.vendor).needs(name.arch)) <= set(found[name.vendor].versions)
    ]
    verb, what = ("needs", "it") if len(ready) == 1 else ("need", "them")
    return [f"{', '.join(ready)} {verb} none of this: compile {what} alone"] if ready else []


def _tables(spec: Spec, wanted: Sequence[TargetName], files: Sequence[Path]) -> dict[TargetName, Table]:
    """The tuning table of each wanted target that needs one; `files` come before the packaged ones."""
    own: dict[TargetName, Table] = {}
    for file in files:
        table = tuning.read(file)
        name = TargetName(*table.target.split(":"))
        if name not in wanted:
            raise RequestError(
                f"--tuning {file}: wanted a table for one of the targets asked for "
                f"({', '.join(map(str, wanted))}), found one for {name}; add --target {name}, or leave it out"
            )
        if name in own:
            raise RequestError(
                f"--tuning {file}: wanted one table for {name}, found a second; leave one of them out"
            )
        if name.arch in spec.targets[name.vendor].tiles:
            raise RequestError(
                f"--tuning {file}: wanted the tiles of {name} from it alone, found some in {spec.file} too; "
                f"delete targets.{name.vendor}.tiles.{name.arch} there, or leave the table out"
            )
        own[name] = table
    return {
        name: own[name] if name in own else tuning.load(name.vendor, name.arch)
        for name in wanted
        if targets.load(name.vendor).ROUTE == "gpgpu" and name.arch not in spec.targets[name.vendor].tiles
    }


def read_source(path: str) -> str:
    """The text of a file under the kernels folder."""
    try:
        return (KERNELS / path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise RequestError(f"{KERNELS / path}: a kernel's source cannot be read: {reason}") from None


def build(
    plan: Plan,
    *,
    cache: Cache,
    jobs: int,
    keep_going: bool = False,
    reporter: Reporter | None = None,
    environ: Mapping[str, str] = os.environ,
) -> BuildResult:
    """Makes every unit and launcher of the plan, `jobs` at once, and the manifest of what was made.

    A failed unit does not stop the others. With `keep_going` its variants, or its target where a ratio would
    lose its general variant, are left out of the manifest; without it there is no manifest. Raises BuildError
    where the cache cannot be written, ToolchainError where a launcher's tools are missing. An interrupt kills
    the workers and passes on.
    """
    run = _Run(plan, cache, max(1, jobs), reporter or Silent(), environ)
    try:
        return run.result(keep_going)
    finally:
        run.reporter.end()


class _Run:
    def __init__(
        self, plan: Plan, cache: Cache, jobs: int, reporter: Reporter, environ: Mapping[str, str]
    ) -> None:
        self.plan = plan
        self.cache = cache
        self.jobs = jobs
        self.reporter = reporter
        self.environ = environ
        self.started = time.monotonic()
        self.failures: list[Failure] = []
        self.counts = {"units_compiled": 0, "units_cached": 0, "launchers_compiled": 0, "launchers_cached": 0}
        self.names = {
            unit.key: f"{target.name} {name}"
            for target in reversed(plan.targets)
            for name, unit in target.units
        }

    def result(self, keep_going: bool) -> BuildResult:
        units = self.plan.units
        self.reporter.begin(len(units) + sum(len(target.hosts) for target in self.plan.targets))
        artifacts = self._units(units)
        assembled = [assemble(target, artifacts) for target in self.plan.targets]
        dropped = [text for each in assembled for text in each.dropped]
        blobs: dict[str, bytes] = {}
        made: list[Target] = []
        if keep_going or not self.failures:
            tables = [each.target for each in assembled if each.target is not None]
            launchers = self._launchers(tables)
            for target in tables:
                own = {host: data for (name, host), data in launchers.items() if name == target.name}
                if not own:
                    dropped.append(f"{target.name}: the whole target, for want of a launcher")
                    continue
                named = {host: _store(blobs, own[host]) for host in sorted(own)}
                made.append(replace(target, launchers=named))
        used = {blob for target in made for blob in target.kernel_blobs.values()}
        for artifact in artifacts.values():
            if artifact.blob in used:
                _store(blobs, artifact.data)
        report = Report(
            **self.counts,
            seconds=time.monotonic() - self.started,
            failures=tuple(self.failures),
            dropped=tuple(dropped),
        )
        if not made or (self.failures and not keep_going):
            return BuildResult(None, {}, report)
        manifest = Manifest(
            kvbuild=metadata.version("kvbuild"),
            targets=tuple(sorted(made, key=lambda target: (target.vendor, target.arch))),
            blobs={name: len(blobs[name]) for name in sorted(blobs)},
        )
        return BuildResult(manifest, blobs, report)

    def _units(self, units: Sequence[Unit]) -> dict[str, Artifact]:
        artifacts: dict[str, Artifact] = {}
        for unit, entry in ((unit, self.cache.get(unit.key)) for unit in units):
            if entry is not None:
                self._take(Compiled(unit, entry.data, entry.facts, 0.0), artifacts)
        lacking = [unit for unit in units if unit.key not in artifacts]
        pool = Pool(self.plan.commands, self.plan.sources, self.jobs, self.environ)
        with closing(pool.run(lacking)) as outcomes:
            for outcome in outcomes:
                if isinstance(outcome, Failed):
                    self._fail(self.names[outcome.unit.key], outcome.error, outcome.seconds)
                elif self._accept(outcome, artifacts):
                    self.cache.put(outcome.unit.key, Entry(outcome.data, outcome.facts))
        return artifacts

    def _take(self, cached: Compiled, artifacts: dict[str, Artifact]) -> None:
        """Accepts a unit from the cache. What others wrote there is no reason to fail: it is made anew."""
        name = self.names[cached.unit.key]
        try:
            checked_answer({**cached.facts, "ok": True})
            artifacts[cached.unit.key] = check(cached)
        except ValueError as error:
            self.reporter.note(f"cache: the entry of {name} cannot be used ({error}); it is made anew")
            return
        self.counts["units_cached"] += 1
        self.reporter.done(name, "cached", 0.0)

    def _accept(self, compiled: Compiled, artifacts: dict[str, Artifact]) -> bool:
        name = self.names[compiled.unit.key]
        try:
            artifacts[compiled.unit.key] = check(compiled)
        except ValueError as error:
            self._fail(name, f"the compiler's result cannot be launched: {error}", compiled.seconds)
            return False
        self.counts["units_compiled"] += 1
        self.reporter.done(name, "compiled", compiled.seconds)
        return True

    def _fail(self, name: str, error: str, seconds: float) -> None:
        self.failures.append(Failure(name, error))
        self.reporter.done(name, "failed", seconds)

    def _launchers(self, tables: Sequence[Target]) -> dict[tuple[str, str], bytes]:
        hosts = {str(target.name): target.hosts for target in self.plan.targets}
        done: dict[tuple[str, str], bytes] = {}
        waiting: list[tuple[str, str, str, Callable[[], bytes]]] = []
        for target in tables:
            table = {name: value for name, value in target.to_json().items() if name != "launchers"}
            for host in hosts[target.name]:
                key = digest({"kind": "launcher", "key": launcher.launcher_key(table, host)})
                entry = self.cache.get(key)
                if entry is None:
                    waiting.append((target.name, host, key, _launcher_job(table, host)))
                    continue
                done[target.name, host] = entry.data
                self.counts["launchers_cached"] += 1
                self.reporter.done(f"{target.name} launcher for {host}", "cached", 0.0)
        for (name, host, key), data, seconds in _concurrently(waiting, self.jobs):
            what = f"{name} launcher for {host}"
            if isinstance(data, BuilderError):
                if isinstance(data, ToolchainError):
                    raise data
                self._fail(what, str(data), seconds)
                continue
            self.cache.put(key, Entry(data, {}))
            done[name, host] = data
            self.counts["launchers_compiled"] += 1
            self.reporter.done(what, "compiled", seconds)
        return done


def _launcher_job(table: Mapping[str, Any], host: str) -> Callable[[], bytes]:
    return lambda: launcher.build_launcher(table, host)


def _concurrently(
    jobs: Sequence[tuple[str, str, str, Callable[[], bytes]]], workers: int
) -> Iterator[tuple[tuple[str, str, str], bytes | BuilderError, float]]:
    with ThreadPoolExecutor(workers) as executor:
        started = {executor.submit(_timed, job): (name, host, key) for name, host, key, job in jobs}
        try:
            left = set(started)
            while left:
                finished, left = wait(left, return_when=FIRST_COMPLETED)
                for future in finished:
                    yield (started[future], *future.result())
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def _timed(job: Callable[[], bytes]) -> tuple[bytes | BuilderError, float]:
    started = time.monotonic()
    try:
        return job(), time.monotonic() - started
    except BuilderError as error:
        return error, time.monotonic() - started


def _store(blobs: dict[str, bytes], data: bytes) -> str:
    name = hashlib.sha256(data).hexdigest()
    blobs[name] = data
    return name
