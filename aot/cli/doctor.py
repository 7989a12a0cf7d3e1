"""`kvbuild doctor`: what this machine can build, load and check; what is missing and how to get it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from . import output

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


@click.command("doctor", help="Show toolchains and devices found, what is missing and how to get it.")
@output.json_option
def command(as_json: bool) -> int:
    found = examine()
    if as_json:
        output.emit_json(found)
    else:
        click.echo(_text(found))
    return output.EXIT_DONE


def examine() -> dict[str, Any]:
    """Everything the command shows, as JSON values. Raises nothing: what fails is itself a finding."""
    packages = {name: _version(name) for name in PACKAGES}
    toolchains, config = _toolchains()
    devices, device_notes = _devices()
    cache = _cache()
    missing = [
        f"{name}, for {purpose}: {pip}" for name, (purpose, pip) in PACKAGES.items() if packages[name] is None
    ]
    # What the packages' own lines say already is not said twice.
    missing += [text for one in toolchains for text in one["missing"] if "kvbuild[compile]" not in text]
    missing += [config["problem"]] if config["problem"] else []
    missing += [cache["problem"]] if cache["problem"] else []
    return {
        "kvbuild": _version("kvbuild"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": packages,
        "config": config,
        "toolchains": toolchains,
        "devices": devices,
        "notes": device_notes,
        "cache": cache,
        "missing": missing,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _toolchains() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    from .. import targets, toolchain

    named, config = _configured()
    found = []
    for vendor in targets.names():
        module = targets.load(vendor)
        one = toolchain.probe(vendor, named, os.environ)
        found.append(
            {
                "vendor": vendor,
                "archs": list(module.ARCHS),
                "command": list(one.command),
                "versions": {name: text for name, text in one.versions.items() if name in module.TOOLS},
                "ready": not one.missing,
                "missing": list(one.missing),
            }
        )
    return found, config


def _configured() -> tuple[dict[str, tuple[str, ...]], dict[str, Any]]:
    from ..errors import RequestError

    try:
        from .. import spec

        path = spec.find()
        return dict(spec.load(path).toolchains), {"file": str(path), "problem": None}
    except ImportError:
        return {}, {"file": None, "problem": None}
    except RequestError as error:
        return {}, {"file": None, "problem": str(error)}


def _devices() -> tuple[list[dict[str, Any]], list[str]]:
    from ...runtime import device
    from ...runtime.errors import DeviceError

    found = [device.cpu_facts().to_json()]
    notes: list[str] = []
    try:
        while True:
            found.append(device.detect(len(found) - 1).to_json())
    except DeviceError as error:
        if len(found) == 1:
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


def _text(found: dict[str, Any]) -> str:
    from ...runtime.facts import Facts

    lines = [f"kvbuild {found['kvbuild']}, Python {found['python']}, {found['platform']}", ""]
    packages = [
        (name, version or "missing", PACKAGES[name][0]) for name, version in found["packages"].items()
    ]
    lines += [output.table(("package", "version", "for"), packages), ""]
    rows = [
        (
            toolchain["vendor"],
            "ready" if toolchain["ready"] else "missing",
            ", ".join(f"{name} {text}" for name, text in sorted(toolchain["versions"].items())) or "-",
            " ".join(toolchain["archs"]),
        )
        for toolchain in found["toolchains"]
    ]
    lines += [output.table(("toolchain", "state", "tools", "archs"), rows), ""]
    lines += [f"device  {Facts.from_json(facts)}" for facts in found["devices"]]
    lines += [f"        no other: {note}" for note in found["notes"]]
    cache = found["cache"]
    state = "writable" if cache["writable"] else "not writable"
    lines += [
        f"cache   {cache['folder'] or 'no folder'} ({state})",
        f"config  {found['config']['file'] or '-'}",
        "",
    ]
    lines += [f"missing: {text}" for text in found["missing"]] or ["nothing is missing"]
    return "\n".join(lines)
