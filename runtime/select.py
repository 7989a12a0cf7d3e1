"""Which target of a bundle a device gets, and why the others were refused. Pure: a manifest and facts in, a
decision out.

A device decides its own vendor: no rule here ever offers the host's cpu target to a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import NoMatchingArtifact
from .facts import Facts
from .manifest import Manifest, Target, host_parts
from .vendors import VENDORS, arch_distance, driver_words


@dataclass(frozen=True)
class Accepted:
    """A target that would run; `host` names the launcher. A lower `distance` is a closer match, 0 exact."""

    target: Target
    host: str
    distance: int

    @property
    def reason(self) -> str:
        return "fits" if self.distance == 0 else f"fits, built for an arch {self.distance} minor below"


@dataclass(frozen=True)
class Rejected:
    """A target that would not run, and why: whole phrases, each with what is wanted and what is here."""

    target: Target
    reason: str


@dataclass(frozen=True)
class Choice:
    """The chosen target, the host whose launcher to load, and the verdict on every target in order."""

    target: Target
    host: str
    trace: tuple[Accepted | Rejected, ...]

    @property
    def launcher(self) -> str:
        """The launcher's blob."""
        return self.target.launchers[self.host]


def evaluate(manifest: Manifest, facts: Facts, strict: bool = False) -> list[Accepted | Rejected]:
    """A verdict on each target, in the manifest's order. `strict` accepts an exact arch only."""
    return [_verdict(target, facts, strict) for target in manifest.targets]


def select(manifest: Manifest, facts: Facts, strict: bool = False) -> Choice:
    """The closest target that fits. Raises NoMatchingArtifact, whose text is the trace."""
    trace = evaluate(manifest, facts, strict)
    fitting = [verdict for verdict in trace if isinstance(verdict, Accepted)]
    if not fitting:
        raise NoMatchingArtifact(
            f"no target of this bundle fits {facts}:\n{describe(trace)}\n{_advice(trace, facts, strict)}"
        )
    best = min(fitting, key=lambda verdict: verdict.distance)
    return Choice(best.target, best.host, tuple(trace))


def describe(trace: list[Accepted | Rejected]) -> str:
    """The verdicts as lines of text."""
    return "\n".join(f"  {verdict.target.name}: {verdict.reason}" for verdict in trace)


def _advice(trace: list[Accepted | Rejected], facts: Facts, strict: bool) -> str:
    """What to do when nothing fits: another build is no help where only the host stands in the way."""
    for verdict in trace:
        if verdict.target.vendor != facts.vendor:
            continue
        distance = arch_distance(facts.vendor, verdict.target.arch, bare_arch(facts))
        if isinstance(distance, int) and not (strict and distance):
            if _unfinished(verdict.target):
                return (
                    f"{verdict.target.name} is for this device and not finished: kvbuild finish BUNDLE, on a "
                    "host with CANN 8.5 or newer (this one, if it has it)"
                )
            return (
                f"{verdict.target.name} has code for this device: mend what its reason names (update the "
                "driver, or build with a launcher for this host: hosts in build.yaml)"
            )
    return _build(facts, strict)


def _build(facts: Facts, strict: bool) -> str:
    """What to build: a target of the device's arch, else of another arch whose code it runs."""
    here, row = bare_arch(facts), VENDORS.get(facts.vendor)
    built = row.devices.built if row is not None else ()
    distances = {arch: arch_distance(facts.vendor, arch, here) for arch in built or (here,)}
    runs = {arch: each for arch, each in distances.items() if isinstance(each, int) and not (strict and each)}
    if not runs:
        has = ", ".join(f"{facts.vendor}:{arch}" for arch in built)
        return f"kvbuild has no target for {facts.vendor}:{here}; it has {has}"
    nearest = min(runs, key=lambda arch: runs[arch])
    return f"build one that does: kvbuild compile --target {facts.vendor}:{nearest}"


def bare_arch(facts: Facts) -> str:
    """The device's arch as a target names it: feature suffixes (:sramecc+:xnack-) are no part of it."""
    return facts.arch.split(":")[0]


def _verdict(target: Target, facts: Facts, strict: bool) -> Accepted | Rejected:
    if target.vendor != facts.vendor:
        return Rejected(target, _another_vendor(target, facts))
    distance = arch_distance(target.vendor, target.arch, bare_arch(facts))
    host = _launcher_host(target, facts)
    refusals = []
    if isinstance(distance, str):
        refusals.append(distance)
    elif strict and distance:
        refusals.append(
            f"strict selection wants the device's own arch {bare_arch(facts)}, it is for {target.arch}"
        )
    if host not in target.launchers:
        refusals.append(host)
    if target.min_driver > facts.driver:
        needed = driver_words(target.vendor, target.min_driver)
        present = driver_words(facts.vendor, facts.driver) if facts.driver else "none"
        refusals.append(f"it needs driver {needed} or newer, this host has {present}")
    if _unfinished(target):
        refusals.append(
            "it is compiled as far as HIVM, not to the end: run `kvbuild finish BUNDLE` on a host with CANN "
            "8.5 or newer"
        )
    if refusals or isinstance(distance, str):
        return Rejected(target, "; ".join(refusals))
    return Accepted(target, host, distance)


def _unfinished(target: Target) -> bool:
    return target.staged is not None and target.staged.stage != "device"


def _another_vendor(target: Target, facts: Facts) -> str:
    reason = f"its vendor is {target.vendor}, this device's is {facts.vendor}"
    if facts.reasons:
        reason += f" ({'; '.join(facts.reasons)})"
    # What several vendors count by the same numbers says nothing of the code.
    capability = facts.marks.capability if facts.marks is not None else ""
    row = VENDORS.get(target.vendor)
    if capability and row is not None and row.devices.distance is not None:
        reason += f", whose compute capability {capability} is not {target.vendor}'s"
    return reason


def _launcher_host(target: Target, facts: Facts) -> str:
    """The host whose launcher runs here (the newest glibc that will do), else why none does."""
    fitting = []
    refusals = []
    for host in target.launchers:
        machine, libc = host_parts(host)
        if machine != facts.host:
            refusals.append(f"its launcher for {host} does not run on this host's machine {facts.host}")
        elif facts.libc_version is None or facts.libc_version < libc:
            found = f"glibc {facts.libc}" if facts.libc else "no glibc"
            refusals.append(f"its launcher for {host} needs glibc {libc[0]}.{libc[1]}, this host has {found}")
        else:
            fitting.append((libc, host))
    return max(fitting)[1] if fitting else "; ".join(sorted(refusals))
