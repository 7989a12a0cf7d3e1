"""The few calls of drivers' libraries that tell of devices, through ctypes; none makes a context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from .errors import DeviceError
from .vendors import Api

PCI_DEVICES = Path("/sys/bus/pci/devices")

# NVIDIA's numbers, which the interfaces that grew out of its driver interface have kept.
_CC_MAJOR, _CC_MINOR = 75, 76
_PCI_BUS, _PCI_DEVICE, _PCI_DOMAIN = 33, 34, 50


class Driver:
    """One opened driver library. Its methods raise DeviceError with the driver's own name and words."""

    def __init__(self, library: ctypes.CDLL, api: Api) -> None:
        self._library = library
        self._api = api
        # Those of the other kind have no device handles, keep a current device, and return words for errors.
        self._contexts = api.kind == "contexts"

    @classmethod
    def open(cls, api: Api) -> Driver | None:
        """The driver of an interface; None where it has none that tells of devices, or this host lacks it."""
        if api.kind not in ("contexts", "devices"):
            return None
        try:
            return cls(ctypes.CDLL(api.library), api)
        except OSError:
            return None

    @property
    def library(self) -> str:
        return self._api.library

    def start(self) -> int:
        """Initialises the driver and returns its code, 0 where that went well."""
        return int(self._function("Init")(0))

    def started(self) -> Driver:
        """Itself, initialised."""
        self._check(self.start(), self._api.prefix + "Init")
        return self

    def count(self) -> int:
        return self._number("DeviceGetCount" if self._contexts else "GetDeviceCount")

    def version(self) -> int:
        return self._number("DriverGetVersion")

    def current(self) -> int:
        """The calling thread's current device, 0 where it has none."""
        device = ctypes.c_int()
        current = self._function("CtxGetDevice" if self._contexts else "GetDevice")
        return device.value if current(ctypes.byref(device)) == 0 else 0

    def capability(self, index: int) -> str:
        """Such as 8.0; empty where this interface is not known to tell it."""
        if not self._contexts:
            return ""
        return f"{self._attribute(_CC_MAJOR, index)}.{self._attribute(_CC_MINOR, index)}"

    def name(self, index: int) -> str:
        text = ctypes.create_string_buffer(256)
        code = self._function("DeviceGetName")(text, len(text), self._device(index))
        self._check(code, self._api.prefix + "DeviceGetName")
        return text.value.decode("utf-8", "replace")

    def pci(self, index: int) -> str:
        """The PCI vendor of a device as sysfs has it, in four hex digits; empty where that cannot be seen."""
        if not self._contexts:
            return ""
        try:
            place = [self._attribute(which, index) for which in (_PCI_DOMAIN, _PCI_BUS, _PCI_DEVICE)]
        except DeviceError:
            return ""
        return pci_vendor(*place)

    def _attribute(self, which: int, index: int) -> int:
        return self._number("DeviceGetAttribute", which, self._device(index))

    def _device(self, index: int) -> ctypes.c_int:
        return ctypes.c_int(self._number("DeviceGet", index) if self._contexts else index)

    def _number(self, name: str, *arguments: object) -> int:
        result = ctypes.c_int()
        self._check(self._function(name)(ctypes.byref(result), *arguments), self._api.prefix + name)
        return result.value

    def _function(self, name: str) -> Callable[..., int]:
        name = self._api.prefix + name
        try:
            function: Callable[..., int] = getattr(self._library, name)
        except AttributeError:
            raise DeviceError(
                f"{self.library}: wanted a driver with the function {name}, found one without it; "
                "install a newer driver"
            ) from None
        return function

    def _check(self, code: int, call: str) -> None:
        if code == 0:
            return
        words = [self._words(getter, code) for getter in ("GetErrorName", "GetErrorString")]
        said = ": ".join(word for word in words if word) or f"error {code}"
        raise DeviceError(f"{call}: {said}")

    def _words(self, getter: str, code: int) -> str:
        function = getattr(self._library, self._api.prefix + getter, None)
        if function is None:
            return ""
        text = ctypes.c_char_p()
        if self._contexts:
            function(code, ctypes.byref(text))
        else:
            function.restype = ctypes.c_char_p
            text.value = function(code)
        return text.value.decode("utf-8", "replace") if text.value else ""


def pci_vendor(domain: int, bus: int, device: int) -> str:
    """The vendor of the PCI device at that place, in four hex digits; empty where sysfs does not show it."""
    path = PCI_DEVICES / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "vendor"
    try:
        text = path.read_text()
    except (OSError, ValueError):
        return ""
    return text.strip().removeprefix("0x").lower()[:4]


def chip_name(api: Api) -> str:
    """What an interface that only names the chip calls it, such as Ascend910B2; "" where it does not."""
    try:
        function = getattr(ctypes.CDLL(api.library), f"{api.prefix}GetSocName")
    except (OSError, AttributeError):
        return ""
    function.restype = ctypes.c_char_p
    return (function() or b"").decode("utf-8", "replace")
