"""`kvbuild doctor`: what this machine can build, load and check; what is missing and how to get it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import output

if TYPE_CHECKING:
    from ...runtime.facts import Facts

# Package -> what it is for, and the pip line.
PACKAGES = {
    "click": ("the command line", "pip install kvbuild"),
    "apache-tvm-ffi": ("loading bundles", "pip install kvbuild"),
    "torch": ("kvbuild check, and most callers", "pip install torch"),
    "triton": ("compiling device kernels", "pip install 'kvbuild[compile]'"),
    "ziglang": ("compiling launchers and the host kernel", "pip install 'kvbuild[compile]'"),
    "pyyaml": ("reading build.yaml", "pip install 'kvbuild[compile]'"),
    "rich": ("the progress display", "pip install 'kvbuild[compile]'"),
}
COMPILING = ("triton", "ziglang", "pyyaml", "rich")
# No host has as many; a driver that says so is wrong.
_MAX_DEVICES = 1024


@click.command("doctor", help="Show toolchains and devices found, what is missing and how to get it.")
@output.json_option
def command(as_json: bool) -> int:
    devices, notes = _devices()
    found = examine((devices, notes))
    if as_json:
        output.emit_json(found)
    else:
        click.echo(output.plain(_text(found, devices)))
    return output.EXIT_DONE


def examine(seen: tuple[list[Facts], list[str]] | None = None) -> dict[str, Any]:
    """Everything the command shows, as JSON values. Raises nothing: what fails is itself a finding.

    seen: the devices, and what was said of others; None: looks for them now.
    role: `build` where any of the packages that compile is installed, else `deploy`: such a host loads
    bundles and lacks nothing by not compiling. missing: what stands in the way of that role.
    """
    devices, notes = seen or _devices()
    packages = {name: _version(name) for name in PACKAGES}
    role = "build" if any(packages[name] for name in COMPILING) else "deploy"
    expected = [name for name in PACKAGES if role == "build" or name not in COMPILING]
    toolchains, config = _toolchains()
    cache = _cache() if role == "build" else {"folder": None, "writable": False, "problem": None}
    missing = [
        f"{name}, for {PACKAGES[name][0]}: {PACKAGES[name][1]}" for name in expected if packages[name] is None
    ]
    # Whoever named an interpreter wants to compile with it; for other vendors a line says what it would take.
    missing += [text for one in toolchains if one["named_in"] for text in one["missing"]]
    missing += [str(each["problem"]) for each in (config, cache) if each["problem"]]
    return {
        "kvbuild": _version("kvbuild"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "role": role,
        "packages": packages,
        "config": config,
        "toolchains": toolchains,
        "ascend": _ascend(),
        "devices": [facts.to_json() for facts in devices],
        "notes": notes,
        "cache": cache,
        "missing": missing,
        "warnings": _warnings(),
    }


def _warnings() -> list[str]:
    from .. import toolchain

    return toolchain.unread_variables(os.environ)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _toolchains() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    from ...runtime import libraries
    from ...runtime.vendors import VENDORS
    from .. import targets, toolchain

    named, config = _configured()
    found = []
    for vendor in targets.names():
        module = targets.load(vendor)
        one = toolchain.probe(vendor, named, os.environ)
        names = VENDORS[vendor].driver.libraries if vendor in VENDORS else ()
        found.append(
            {
                "vendor": vendor,
                "archs": list(module.ARCHS),
                "builds": [arch for arch in module.ARCHS if set(module.needs(arch)) <= set(one.versions)],
                "command": list(one.command),
                "named_in": one.origin,
                "versions": {name: text for name, text in one.versions.items() if name in module.TOOLS},
                "ready": not one.missing,
                "missing": list(one.missing),
                "driver": {"names": list(names), "present": list(libraries.present(names))},
            }
        )
    return found, config


def _ascend() -> dict[str, Any]:
    """What of CANN and torch_npu is here: hivmc's place and version, or why there is none; CANN's folder by
    its variable; whether libascendcl.so would be found; torch_npu's version."""
    from ...runtime import libraries
    from .. import finish
    from ..errors import BuilderError

    hivmc: dict[str, str] | None = None
    problem: str | None = None
    try:
        tool = finish.find_hivmc(os.environ)
        hivmc = {"path": str(tool.path), "version": tool.version}
    except BuilderError as error:
        problem = str(error)
    cann = next((name for name in finish.HOMES if os.environ.get(name)), None)
    return {
        "hivmc": hivmc,
        "problem": problem,
        "cann": cann and {"folder": os.environ[cann], "named_in": cann},
        "libascendcl": bool(libraries.present(("libascendcl.so",))),
        "torch_npu": _version("torch_npu"),
    }


def _ascend_lines(found: dict[str, Any], devices: Sequence[Facts]) -> list[str]:
    """Nothing on a host that has nothing of Ascend's."""
    hivmc, cann, torch_npu = found["hivmc"], found["cann"], found["torch_npu"]
    here = hivmc or cann or found["libascendcl"] or torch_npu
    if not here and not any(facts.vendor == "ascend" for facts in devices):
        return []
    from ...runtime.vendors import VENDORS

    source = f"not found; `{VENDORS['ascend'].driver.setup}` (wherever CANN lies)"
    tool = f"hivmc: {hivmc['path']}, version {hivmc['version']}" if hivmc else found["problem"]
    return [
        f"ascend  {tool}",
        f"        CANN: {cann['folder']} ({cann['named_in']})" if cann else f"        CANN: {source}",
        f"        libascendcl.so: {'found' if found['libascendcl'] else source}",
        f"        torch_npu: {torch_npu or 'not installed; kvbuild check and torch need it on an NPU'}",
    ]


def _configured() -> tuple[dict[str, tuple[str, ...]], dict[str, Any]]:
    from ..errors import RequestError

    try:
        from .. import spec

        path = spec.find()
        return dict(spec.load(path).toolchains), {"file": str(path), "problem": None}
    except ImportError:
        return {}, {"file": None, "problem": None}
    except (RequestError, OSError) as error:
        return {}, {"file": None, "problem": output.message_of(error)}
    except Exception as error:  # of a package that is half there
        what = f"PyYAML cannot be imported ({type(error).__name__}: {error})"
        return {}, {"file": None, "problem": f"{what}; pip install --force-reinstall pyyaml"}


def _devices() -> tuple[list[Facts], list[str]]:
    from ...runtime import device
    from ...runtime.errors import DeviceError

    found = [device.cpu_facts()]
    notes: list[str] = []
    try:
        while len(found) <= _MAX_DEVICES:
            found.append(device.detect(len(found) - 1))
    except DeviceError as error:
        if len(found) == 1 or not str(error).startswith("wanted device"):
            notes.append(str(error))
    return found, notes


def _cache() -> dict[str, Any]:
    from ..cache import Cache, default_folder
    from ..errors import BuilderError

    folder: Path | None = None
    try:
        folder = default_folder(os.environ)
        Cache(folder)
    except BuilderError as error:
        return {"folder": None if folder is None else str(folder), "writable": False, "problem": str(error)}
    return {"folder": str(folder), "writable": True, "problem": None}


def _text(found: dict[str, Any], devices: Sequence[Facts]) -> str:
    lines = [f"kvbuild {found['kvbuild']}, Python {found['python']}, {found['platform']}", ""]
    packages = [
        (name, version or "missing", PACKAGES[name][0]) for name, version in found["packages"].items()
    ]
    lines += [output.table(("package", "version", "for"), packages), ""]
    rows = [_row(one) for one in found["toolchains"]]
    lines += [output.table(("vendor", "compiles here", "driver here", "tools"), rows), ""]
    how_to = [text for one in found["toolchains"] for text in _how_to(one, found["role"])]
    lines += [*how_to, ""] if how_to else []
    for facts in devices:
        why = f": {'; '.join(facts.reasons)}" if facts.reasons else ""
        lines.append(f"device  {facts}{why}")
    lines += [f"        no other: {note}" for note in found["notes"]]
    lines += _ascend_lines(found["ascend"], devices)
    if found["role"] == "deploy":
        what = "this host loads bundles and compiles none; to compile here:"
        if any(one["builds"] for one in found["toolchains"]):
            what = "what kvbuild itself compiles with is not installed; to compile here:"
        lines += ["", f"{what} pip install 'kvbuild[compile]'"]
        return "\n".join([*lines, *_missing(found)])
    cache = found["cache"]
    state = "writable" if cache["writable"] else "not writable"
    lines += [
        f"cache   {cache['folder'] or 'no folder'} ({state})",
        f"config  {found['config']['file'] or '-'}",
        "",
    ]
    return "\n".join([*lines, *_missing(found)])


def _missing(found: dict[str, Any]) -> list[str]:
    warnings = [f"warning: {text}" for text in found["warnings"]]
    missing = [f"missing: {text}" for text in found["missing"]]
    return [*warnings, *(missing or ["nothing is missing for what was set up"])]


def _row(one: dict[str, Any]) -> tuple[str, str, str, str]:
    builds = " ".join(one["builds"]) or "-"
    if one["builds"] and one["builds"] != one["archs"]:
        builds += f" (of {len(one['archs'])})"
    driver = ", ".join(one["driver"]["present"]) or ("-" if one["driver"]["names"] else "none needed")
    tools = ", ".join(f"{name} {text}" for name, text in sorted(one["versions"].items()))
    return one["vendor"], builds, driver, (tools if one["builds"] else "") or "-"


def _how_to(one: dict[str, Any], role: str) -> list[str]:
    """What compiling for a vendor would take, on a host that compiles for others."""
    if one["ready"] or role == "deploy" or one["named_in"]:
        return []
    lacking = " ".join(arch for arch in one["archs"] if arch not in one["builds"])
    sentences = [text.removeprefix(f"{one['vendor']}: ") for text in one["missing"]]
    return [f"{one['vendor']} cannot compile {lacking} here: {text}" for text in sentences]
