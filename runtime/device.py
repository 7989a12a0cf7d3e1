"""Facts about this host and its devices. Asks the driver's library or the kernel; creates no context."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DeviceError
from .facts import Facts

NVIDIA_LIBRARY = "libcuda.so.1"
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")

_WANTED = "None, 'cpu', 'cuda', 'cuda:1', 'rocm', a torch.device or a device's index"
_GPU_TYPES = {"cuda": None, "rocm": "amd", "hip": "amd"}
_CC_MAJOR, _CC_MINOR = 75, 76


@dataclass(frozen=True)
class Request:
    """What the caller asked for: vendor None is whichever accelerator is here, index None the current one."""

    kind: str
    vendor: str | None
    index: int | None


def detect(device: object = None) -> Facts:
    """Facts about a device of this process.

    device: None for the process's current device (the cpu where there is no accelerator), 'cpu', 'cuda',
    'cuda:1', 'rocm', a torch.device, or an accelerator's index. ValueError or TypeError for anything else;
    DeviceError where there is no such device or its driver refuses.
    """
    if device is None:
        return _current()
    request = parse_device(device)
    return cpu_facts() if request.kind == "cpu" else _gpu_facts(request)


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
        return Request("cpu", "cpu", 0)
    if match is None or match[1] not in _GPU_TYPES:
        raise ValueError(f"device: wanted {_WANTED}, found {device!r}")
    return Request("gpu", _GPU_TYPES[match[1]], None if match[2] is None else int(match[2]))


def cpu_facts() -> Facts:
    """Facts about the host as a device of its own."""
    machine = os.uname().machine
    return Facts("cpu", machine, _cpu_name() or machine, 0, 0, "", machine, _glibc())


def _current() -> Facts:
    torch = _torch()
    if torch is not None:
        if not torch.cuda.is_available():
            return cpu_facts()
        return _gpu_facts(Request("gpu", None, None))
    driver = _Cuda.open()
    if driver is not None and driver.start() == 0 and driver.count() > 0:
        return _nvidia_facts(driver, driver.current())
    nodes = kfd_archs(KFD_NODES)
    return _amd_facts_of(nodes, 0) if nodes else cpu_facts()


def _gpu_facts(request: Request) -> Facts:
    torch = _torch()
    index = request.index
    if index is None:
        usable = torch is not None and torch.cuda.is_available()
        index = torch.cuda.current_device() if torch is not None and usable else None
    vendor = request.vendor or _vendor_here(torch)
    if vendor == "amd":
        if torch is not None and getattr(torch.version, "hip", None):
            return _torch_amd_facts(torch, index or 0)
        return _amd_facts_of(kfd_archs(KFD_NODES), index or 0)
    driver = _Cuda.open()
    if driver is None:
        raise DeviceError(
            f"wanted device {_asked(index)}, found no {NVIDIA_LIBRARY} on this host; "
            "install the vendor's driver, or load with device='cpu'"
        )
    driver.check(driver.start(), "cuInit")
    return _nvidia_facts(driver, driver.current() if index is None else index)


def _vendor_here(torch: Any) -> str:
    if torch is not None and getattr(torch.version, "hip", None):
        return "amd"
    if torch is not None and getattr(torch.version, "cuda", None):
        return "nvidia"
    return "amd" if _Cuda.open() is None and kfd_archs(KFD_NODES) else "nvidia"


def _nvidia_facts(driver: _Cuda, index: int) -> Facts:
    count = driver.count()
    if index >= count:
        raise _no_such_device(index, count)
    major, minor = driver.capability(index)
    return _facts("nvidia", f"sm_{major}{minor}", driver.name(index), index, driver.version(), NVIDIA_LIBRARY)


def _torch_amd_facts(torch: Any, index: int) -> Facts:
    count = torch.cuda.device_count()
    if index >= count:
        raise _no_such_device(index, count)
    properties = torch.cuda.get_device_properties(index)
    return _facts("amd", properties.gcnArchName, properties.name, index, 0, "libamdhip64.so")


def _amd_facts_of(archs: list[str], index: int) -> Facts:
    if index >= len(archs):
        raise _no_such_device(index, len(archs))
    return _facts("amd", archs[index], archs[index], index, 0, "")


def _facts(vendor: str, arch: str, name: str, index: int, driver: int, library: str) -> Facts:
    return Facts(vendor, arch, name or arch, index, driver, library, os.uname().machine, _glibc())


def _no_such_device(index: int, count: int) -> DeviceError:
    has = "no device" if count == 0 else f"{count}, numbered from 0"
    return DeviceError(f"wanted device {index}, found {has}; check the index and CUDA_VISIBLE_DEVICES")


def _asked(index: int | None) -> str:
    return "cuda" if index is None else f"cuda:{index}"


class _Cuda:
    """The few driver calls that need no context, through ctypes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @classmethod
    def open(cls) -> _Cuda | None:
        try:
            return cls(ctypes.CDLL(NVIDIA_LIBRARY))
        except OSError:
            return None

    def start(self) -> int:
        return int(self._library.cuInit(0))

    def count(self) -> int:
        return self._number(self._library.cuDeviceGetCount, "cuDeviceGetCount")

    def version(self) -> int:
        return self._number(self._library.cuDriverGetVersion, "cuDriverGetVersion")

    def current(self) -> int:
        """The calling thread's current device, 0 where it has no context."""
        device = ctypes.c_int()
        return device.value if self._library.cuCtxGetDevice(ctypes.byref(device)) == 0 else 0

    def capability(self, index: int) -> tuple[int, int]:
        device = self._device(index)
        attribute = self._library.cuDeviceGetAttribute
        major = self._number(attribute, "cuDeviceGetAttribute", _CC_MAJOR, device)
        return major, self._number(attribute, "cuDeviceGetAttribute", _CC_MINOR, device)

    def name(self, index: int) -> str:
        text = ctypes.create_string_buffer(256)
        self.check(self._library.cuDeviceGetName(text, len(text), self._device(index)), "cuDeviceGetName")
        return text.value.decode("utf-8", "replace")

    def check(self, code: int, call: str) -> None:
        """Raises DeviceError with the driver's own name and words for a code that is not 0."""
        if code == 0:
            return
        words = [self._words(getter, code) for getter in ("cuGetErrorName", "cuGetErrorString")]
        said = ": ".join(word for word in words if word) or f"error {code}"
        raise DeviceError(f"{call}: {said}")

    def _words(self, getter: str, code: int) -> str:
        text = ctypes.c_char_p()
        getattr(self._library, getter)(code, ctypes.byref(text))
        return text.value.decode("utf-8", "replace") if text.value else ""

    def _device(self, index: int) -> ctypes.c_int:
        return ctypes.c_int(self._number(self._library.cuDeviceGet, "cuDeviceGet", index))

    def _number(self, function: Callable[..., int], call: str, *arguments: object) -> int:
        result = ctypes.c_int()
        self.check(function(ctypes.byref(result), *arguments), call)
        return result.value


def kfd_archs(nodes: Path) -> list[str]:
    """The arch of each AMD GPU in the kernel's topology, in its order; empty where there is none."""
    try:
        folders = sorted((path for path in nodes.iterdir() if path.name.isdigit()), key=lambda p: int(p.name))
    except OSError:
        return []
    archs = []
    for folder in folders:
        try:
            text = (folder / "properties").read_text()
        except OSError:
            continue  # a node that this container may not use
        match = re.search(r"^gfx_target_version\s+([0-9]+)$", text, re.MULTILINE)
        if match is not None and int(match[1]) > 0:
            archs.append(gfx_name(int(match[1])))
    return archs


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
