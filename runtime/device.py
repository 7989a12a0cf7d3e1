"""Facts about this host and its devices. Asks torch, the driver's library or the kernel; creates no context.

Whose a device is, is decided by `identity` from the marks that are gathered here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import identity, libraries, vendors
from .drivers import Driver, chip_name, pci_vendor
from .errors import DeviceError
from .facts import Facts
from .identity import Marks
from .vendors import APIS

KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")

# What people and torch call devices -> the interface that this means; None: what this host has.
_GPU_TYPES = {"cuda": None, "rocm": "hip", "hip": "hip"}
_GPU_TYPES |= {api.torch: name for name, api in APIS.items() if api.torch != "cuda"}
_WANTED = f"None, 'cpu', 'cuda:1', {', '.join(map(repr, _GPU_TYPES))}, a torch.device or a device's index"


@dataclass(frozen=True)
class Request:
    """What the caller asked for.

    kind: cpu or gpu. api: an interface of vendors.APIS, None for whichever is here. index: None for the
    current device.
    """

    kind: str
    api: str | None
    index: int | None


@dataclass(frozen=True)
class _Seen:
    """One device as it was found: its marks but for libraries, its driver's version and library."""

    marks: Marks
    index: int
    driver: int = 0
    library: str = ""


def detect(device: object = None) -> Facts:
    """Facts about a device of this process.

    device: None for the process's current device (the cpu where there is no accelerator), 'cpu', 'cuda',
    'cuda:1', 'rocm', 'musa', 'npu', a torch.device, or an accelerator's index. ValueError or TypeError for
    anything else; DeviceError where there is no such device, its driver refuses, or its vendor is not clear.
    """
    request = Request("gpu", None, None) if device is None else parse_device(device)
    if request.kind == "cpu":
        return cpu_facts()
    torch = _torch()
    found = _by_torch(torch, request) if torch is not None else None
    if device is None and torch is not None and found is None:
        return cpu_facts()
    found = found or _by_driver(torch, request, must=device is not None)
    return cpu_facts() if found is None else _identified(found)


def parse_device(device: object) -> Request:
    """Reads a device as `detect` takes it, except None."""
    if isinstance(device, bool):
        raise TypeError(f"device: wanted {_WANTED}, found {device!r}")
    if isinstance(device, int):
        if device < 0:
            raise ValueError(f"device: wanted an index of 0 or more, found {device}")
        return Request("gpu", None, device)
    if not isinstance(device, str):
        kind, index = getattr(device, "type", None), getattr(device, "index", None)
        if not isinstance(kind, str) or not (index is None or isinstance(index, int)):
            raise TypeError(f"device: wanted {_WANTED}, found {type(device).__name__}")
        device = kind if index is None else f"{kind}:{index}"
    match = re.fullmatch(r"([a-z]+)(?::([0-9]{1,4}))?", device)
    if match is not None and match[1] == "cpu" and match[2] in (None, "0"):
        return Request("cpu", None, 0)
    if match is None or match[1] not in _GPU_TYPES:
        raise ValueError(f"device: wanted {_WANTED}, found {device!r}")
    return Request("gpu", _GPU_TYPES[match[1]], None if match[2] is None else int(match[2]))


def cpu_facts() -> Facts:
    """Facts about the host as a device of its own."""
    machine = os.uname().machine
    return Facts("cpu", machine, _cpu_name() or machine, 0, 0, "", machine, _glibc())


def torch_marks(torch: Any) -> tuple[str, ...]:
    """Those of vendors.torch_marks that this build of torch bears."""
    return tuple(mark for mark in vendors.torch_marks() if _bears(torch, mark))


def _bears(torch: Any, mark: str) -> bool:
    path, _, held = mark.partition("=")
    found = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return held in str(found) if held else bool(found)


def _identified(seen: _Seen) -> Facts:
    marks = replace(seen.marks, libraries=libraries.present(vendors.libraries()))
    found = identity.identify(marks)
    if not found.vendor:
        raise DeviceError(
            f"device {seen.index} ({marks.name or marks.code or marks.api}): wanted a device of one vendor "
            f"that kvbuild knows, found: {'; '.join(found.reasons)}; install a kvbuild that knows it, or let "
            "the process see one vendor's driver alone"
        )
    return Facts(
        vendor=found.vendor,
        arch=found.arch,
        name=marks.name or found.arch,
        index=seen.index,
        driver=seen.driver,
        driver_library=seen.library,
        host=os.uname().machine,
        libc=_glibc(),
        marks=marks,
    )


def _by_torch(torch: Any, request: Request) -> _Seen | None:
    """The device as the imported torch has it; None where torch has none of that kind, or knows less than the
    driver does: NVIDIA's tells its version too."""
    marks = torch_marks(torch)
    for kind in dict.fromkeys(api.torch for api in APIS.values()):
        api = kind if kind != "cuda" or "version.hip" not in marks else "hip"
        module = getattr(torch, kind, None)
        if module is None or request.api not in (None, api) or not module.is_available():
            continue
        index = module.current_device() if request.index is None else request.index
        if api == "cuda":
            driver = Driver.open(APIS[api].driver)
            if driver is not None:
                return _seen_by(driver.started(), api, index, marks)
        if index >= module.device_count():
            raise _no_such_device(index, module.device_count())
        return _Seen(_torch_device(module.get_device_properties(index), api, marks), index)
    return None


def _torch_device(properties: Any, api: str, marks: tuple[str, ...]) -> Marks:
    def of(name: str, default: Any = None) -> Any:
        return getattr(properties, name, default)

    name = str(of("name", ""))
    capability = "" if api in ("hip", "npu") or of("major") is None else f"{of('major')}.{of('minor', 0)}"
    place = [of(f"pci_{part}_id") for part in ("domain", "bus", "device")]
    pci = pci_vendor(*place) if all(isinstance(number, int) for number in place) else ""
    code = str(of("gcnArchName", "")) if api == "hip" else name if api == "npu" else ""
    return Marks(api, name, capability, code, pci, marks)


def _by_driver(torch: Any, request: Request, must: bool) -> _Seen | None:
    """The device as a driver's library or the kernel has it. must: DeviceError where there is none."""
    marks = () if torch is None else torch_marks(torch)
    if torch is not None and request.api is None and "version.hip" in marks:
        request = replace(request, api="hip")
    wanted = APIS if request.api is None else (request.api,)
    for api in wanted:
        driver = Driver.open(APIS[api].driver) if _worth_loading(api) else None
        if driver is not None and (must or driver.start() == 0) and (must or driver.count() > 0):
            driver = driver.started()
            index = driver.current() if request.index is None else request.index
            return _seen_by(driver, api, index, marks)
        if api == "hip" and (nodes := kfd_nodes(KFD_NODES)):
            return _seen_in(nodes, request.index or 0, marks)
        if _worth_loading(api) and (name := chip_name(APIS[api].driver)):
            return _Seen(Marks(api, name, code=name), request.index or 0, library=_library(api))
    if not must:
        return None
    if request.api == "hip":
        raise _no_such_device(request.index or 0, 0)
    meant = APIS[request.api or "cuda"]
    asked = meant.torch if request.index is None else f"{meant.torch}:{request.index}"
    remedy = "install the vendor's driver"
    if meant.driver is not None and meant.driver.setup:
        remedy = (
            f"it comes with {meant.driver.product}: install that, and `{meant.driver.setup}` (wherever that "
            "lies) before Python starts"
        )
    raise DeviceError(
        f"wanted device {asked}, found no {_library(request.api or 'cuda')} on this host; {remedy}, or load "
        "with device='cpu'"
    )


def _worth_loading(api: str) -> bool:
    """A driver that this host does not have is not looked for by loading it."""
    library = _library(api)
    return api == "cuda" or bool(library and libraries.present((library,)))


def _library(api: str) -> str:
    driver = APIS[api].driver
    return "" if driver is None else driver.libraries[0]


def _seen_by(driver: Driver, api: str, index: int, marks: tuple[str, ...]) -> _Seen:
    count = driver.count()
    if index >= count:
        raise _no_such_device(index, count)
    found = Marks(api, driver.name(index), driver.capability(index), "", driver.pci(index), marks)
    return _Seen(found, index, driver.version(), driver.library)


def _seen_in(nodes: Sequence[tuple[str, str]], index: int, marks: tuple[str, ...]) -> _Seen:
    if index >= len(nodes):
        raise _no_such_device(index, len(nodes))
    code, pci = nodes[index]
    return _Seen(Marks("hip", "", "", code, pci, marks), index)


def _no_such_device(index: int, count: int) -> DeviceError:
    has = "no device" if count == 0 else f"{count}, numbered from 0"
    return DeviceError(
        f"wanted device {index}, found {has}; check the index, and what hides devices (CUDA_VISIBLE_DEVICES "
        "and its like)"
    )


def kfd_nodes(nodes: Path) -> list[tuple[str, str]]:
    """(code, PCI vendor) of each GPU in the topology that AMD's kernel driver and Hygon's show, in its order;
    empty where there is none."""
    try:
        folders = sorted((path for path in nodes.iterdir() if path.name.isdigit()), key=lambda p: int(p.name))
    except OSError:
        return []
    found = []
    for folder in folders:
        try:
            text = (folder / "properties").read_text()
        except OSError:
            continue  # a node that this container may not use
        match = re.search(r"^gfx_target_version\s+([0-9]+)$", text, re.MULTILINE)
        if match is not None and int(match[1]) > 0:
            vendor = re.search(r"^vendor_id\s+([0-9]+)$", text, re.MULTILINE)
            found.append((gfx_name(int(match[1])), f"{int(vendor[1]):04x}" if vendor else ""))
    return found


def gfx_name(version: int) -> str:
    """The kernel's gfx_target_version as an arch: two decimal digits each of major, minor and stepping, of
    which the name writes the last two in hex (90402 is gfx942, 90010 is gfx90a)."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _torch() -> Any:
    """torch, if the caller has imported it."""
    return sys.modules.get("torch")


def _glibc() -> str:
    try:
        words = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
    except (AttributeError, ValueError, OSError):
        return ""
    match = re.match(r"[0-9]+\.[0-9]+", words[1]) if len(words) == 2 and words[0] == "glibc" else None
    return match[0] if match else ""


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
                if not line.strip():
                    break
    except OSError:
        pass
    return ""
