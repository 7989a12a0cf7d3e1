"""Where and with what something was measured."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from pathlib import Path
from typing import Any

import torch

from .place import Place


def record(operator: Any, place: Place) -> dict[str, Any]:
    """Date, device, what was built with which tools, and the versions here; JSON values."""
    target = operator.target
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "device": place.name,
        "target": target.name,
        "source_digest": target.source_digest,
        "toolchain": dict(target.toolchain),
        "tools": dict(target.tools),
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """The versions of what runs here; the driver's is empty where there is none."""
    return {
        "kvbuild": package_version("kvbuild"),
        "apache-tvm-ffi": package_version("apache-tvm-ffi"),
        "torch": torch.__version__,
        "cuda of torch": torch.version.cuda,
        "driver": driver_release(),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def driver_release() -> str:
    """The NVIDIA driver's release, such as 580.159.04; empty where there is none."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdigit() and word.count(".") >= 1), "")
