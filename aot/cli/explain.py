"""`kvbuild explain`: what this host, or another, would load from a bundle, and why not the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..errors import RequestError
from . import output

if TYPE_CHECKING:
    from ...runtime.facts import Facts
    from ...runtime.select import Accepted, Rejected

_MAX_FACTS = 16 << 20


@click.command("explain", help="Say what this host would load from a bundle, and why the rest was refused.")
@click.argument("file")
@click.option("--facts", "facts_file", metavar="FACTS.json", help="Decide for the host these facts describe: "
              "what `kvbuild explain --json` printed there, or its device's marks alone.")  # fmt: skip
@click.option("--device", metavar="D", help="Decide for this device, as torch names it: cpu, cuda, cuda:1, "
              "npu:0.")
@click.option("--strict", is_flag=True, help="Accept the device's exact arch alone.")
@output.json_option
def command(file: str, facts_file: str | None, device: str | None, strict: bool, as_json: bool) -> int:
    from ...runtime import select
    from ...runtime.bundle import open_bundle
    from ...runtime.errors import NoMatchingArtifact

    if facts_file is not None and device is not None:
        raise click.UsageError("--facts and --device exclude each other: the facts name their device")
    path = output.existing_bundle(file)
    facts = _facts_of_file(facts_file) if facts_file is not None else _facts_here(device)
    with open_bundle(path) as bundle:
        trace = select.evaluate(bundle.manifest, facts, strict)
        chosen: str | None = None
        evidence: str | None = None
        launcher: str | None = None
        refusal: str | None = None
        try:
            choice = select.select(bundle.manifest, facts, strict)
            chosen, launcher = choice.target.name, choice.host
            evidence = choice.target.toolchain.get("evidence")
        except NoMatchingArtifact as error:
            refusal = str(error)
    if as_json:
        output.emit_json(
            {
                "bundle": str(path),
                "facts": facts.to_json(),
                "strict": strict,
                "chosen": chosen,
                "launcher": launcher,
                "evidence": evidence,
                "trace": [_verdict_json(verdict) for verdict in trace],
            }
        )
    elif refusal is not None:
        click.echo(refusal)
    else:
        click.echo(f"{'the host of ' + facts_file if facts_file else 'this host'}: {facts}")
        rows = [(*_row(verdict, chosen), verdict.reason) for verdict in trace]
        click.echo(output.table(("target", "decision", "reason"), rows))
        click.echo(f"loads {chosen} with the launcher for {launcher}")
        if evidence is not None:
            click.echo(f"{chosen}: {evidence}")
    return output.EXIT_DONE if refusal is None else output.EXIT_FAILED


def _facts_of_file(name: str) -> Facts:
    from ...runtime import strictjson
    from ...runtime.facts import Facts

    advice = "make one with `kvbuild explain FILE.kvb --json`"
    path = output.existing_file(name, "--facts", advice, pipes=True)
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FACTS + 1)
        if len(data) > _MAX_FACTS:
            raise ValueError(f"wanted at most {_MAX_FACTS} bytes, found more")
        value = strictjson.parse(data)
        if isinstance(value, dict) and isinstance(value.get("facts"), dict):
            value = value["facts"]
        return Facts.from_json(value)
    except ValueError as error:
        raise RequestError(f"--facts {name}: {error}; {advice}") from None


def _facts_here(device: str | None) -> Facts:
    from ...runtime.device import detect

    output.device_name(device)
    return detect(device)


def _verdict_json(verdict: Accepted | Rejected) -> dict[str, Any]:
    from ...runtime.select import Accepted

    return {
        "target": verdict.target.name,
        "accepted": isinstance(verdict, Accepted),
        "reason": verdict.reason,
    }


def _row(verdict: Accepted | Rejected, chosen: str | None) -> tuple[str, str]:
    from ...runtime.select import Accepted

    if not isinstance(verdict, Accepted):
        return verdict.target.name, "refused"
    return verdict.target.name, "chosen" if verdict.target.name == chosen else "would do"
