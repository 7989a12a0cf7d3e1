"""The few calls of drivers' libraries that tell of devices, through ctypes; none makes a context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path

from . import vendors
from .errors import DeviceError

PCI_DEVICES = Path("/sys/bus/pci/devices")

# NVIDIA's numbers, which the interfaces that grew out of its driver interface have kept.
_CC_MAJOR, _CC_MINOR = 75, 76
_PCI_BUS, _PCI_DEVICE, _PCI_DOMAIN = 33, 34, 50


class Driver:
    """One opened driver library. Its methods raise DeviceError with the driver's own name and words."""

    def __init__(self, library: ctypes.CDLL, name: str, functions: Mapping[str, str]) -> None:
        self._library = library
        self.library = name
        self._functions = functions
        # Those of the other kind have no device handles, and keep a current device.
        self._contexts = "context_device" in functions

    @classmethod
    def open(cls, driver: vendors.Driver | None) -> Driver | None:
        """A driver by its first library; None where it tells nothing of devices, or this host lacks it."""
        if driver is None or "device_name" not in driver.functions:
            return None
        try:
            return cls(ctypes.CDLL(driver.libraries[0]), driver.libraries[0], driver.functions)
        except OSError:
            return None

    def start(self) -> int:
        """Initialises the driver and returns its code, 0 where that went well."""
        return int(self._function("init")(0))

    def started(self) -> Driver:
        """Itself, initialised."""
        self._check(self.start(), "init")
        return self

    def count(self) -> int:
        return self._number("device_count")

    def version(self) -> int:
        return self._number("driver_version")

    def current(self) -> int:
        """The calling thread's current device, 0 where it has none."""
        device = ctypes.c_int()
        current = self._function("context_device" if self._contexts else "device_current")
        return device.value if current(ctypes.byref(device)) == 0 else 0

    def capability(self, index: int) -> str:
        """Such as 8.0; empty where this interface is not known to tell it."""
        if not self._contexts:
            return ""
        return f"{self._attribute(_CC_MAJOR, index)}.{self._attribute(_CC_MINOR, index)}"

    def name(self, index: int) -> str:
        text = ctypes.create_string_buffer(256)
        code = self._function("device_name")(text, len(text), self._device(index))
        self._check(code, "device_name")
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
        return self._number("device_property", which, self._device(index))

    def _device(self, index: int) -> ctypes.c_int:
        return ctypes.c_int(self._number("device_handle", index) if self._contexts else index)

    def _number(self, role: str, *arguments: object) -> int:
        result = ctypes.c_int()
        self._check(self._function(role)(ctypes.byref(result), *arguments), role)
        return result.value

    def _function(self, role: str) -> Callable[..., int]:
        name = self._functions[role]
        try:
            function: Callable[..., int] = getattr(self._library, name)
        except AttributeError:
            raise DeviceError(
                f"{self.library}: wanted a driver with the function {name}, found one without it; "
                "install a newer driver"
            ) from None
        return function

    def _check(self, code: int, role: str) -> None:
        if code == 0:
            return
        words = [self._words(getter, code) for getter in ("error_name", "error_string")]
        said = ": ".join(word for word in words if word) or f"error {code}"
        raise DeviceError(f"{self._functions[role]}: {said}")

    def _words(self, role: str, code: int) -> str:
        """The driver's words, which some return and some put where they are told."""
        text = ctypes.c_char_p()
        into = self._functions.get(f"{role}_into")
        function = getattr(self._library, into or self._functions[role], None)
        if function is None:
            return ""
        if into:
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


def chip_name(driver: vendors.Driver | None) -> str:
    """What a driver that names its chip alone calls it, such as Ascend910B2; "" where it does not."""
    if driver is None or "chip_name" not in driver.functions:
        return ""
    try:
        function = getattr(ctypes.CDLL(driver.libraries[0]), driver.functions["chip_name"])
    except (OSError, AttributeError):
        return ""
    function.restype = ctypes.c_char_p
    return (function() or b"").decode("utf-8", "replace")
