"""Whose device this is, decided from what a host shows of it. Pure.

Five vendors' devices are `cuda` to torch and two are `hip`, some report a compute capability of NVIDIA's, and
one brings a library under the name of NVIDIA's. So nobody is taken at one word: a device's PCI vendor, its
name, its code's name and the build of torch that drives it must not contradict each other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .strictjson import Node, field_names
from .vendors import APIS, VENDORS, Devices

_CAPABILITY = re.compile(r"([0-9]{1,3}\.[0-9]{1,3})?")
_PCI = re.compile(r"([0-9a-f]{4})?")


@dataclass(frozen=True)
class Marks:
    """What a host shows of one device, before anyone has said whose it is. Empty where it shows nothing.

    api:        the interface that knows the device: a key of APIS.
    name:       the device's name, such as NVIDIA H200 or PPU-ZW810E.
    capability: the compute capability it reports, such as 8.0.
    code:       what its runtime calls its code, such as gfx942:sramecc+:xnack- or Ascend910B2.
    pci:        the PCI vendor's number in four hex digits, such as 10de.
    torch:      the marks (vendors.torch_marks) that the build of torch which drives it bears.
    libraries:  of the libraries that VENDORS names, those that this host has.
    """

    api: str
    name: str = ""
    capability: str = ""
    code: str = ""
    pci: str = ""
    torch: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()

    @classmethod
    def read(cls, node: Node) -> Marks:
        """Reads parsed JSON; whatever a host shows nothing of may be left out. JsonError for a mistake."""
        nothing = {"name": "", "capability": "", "code": "", "pci": "", "torch": [], "libraries": []}
        value = {**nothing, **node.value} if isinstance(node.value, dict) else node.value
        at = Node(value, node.step, node.parent).fields(field_names(cls))
        return cls(
            api=at["api"].string(*APIS),
            name=at["name"].line(empty=True),
            capability=at["capability"].matching(_CAPABILITY, "a capability such as 8.0, or an empty string"),
            code=at["code"].line(empty=True),
            pci=at["pci"].matching(_PCI, "four hex digits such as 10de, or an empty string"),
            torch=at["torch"].each(Node.string),
            libraries=at["libraries"].each(Node.string),
        )

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in field_names(type(self))}
        return plain | {"torch": list(self.torch), "libraries": list(self.libraries)}


@dataclass(frozen=True)
class Identity:
    """Whose device it is. vendor: "" where that cannot be said. arch: as a target names it, "" without a
    vendor. reasons: what the decision rests on, each a phrase."""

    vendor: str
    arch: str
    reasons: tuple[str, ...]


def identify(marks: Marks) -> Identity:
    """The vendor of a device and its arch, with the reasons; without a vendor where marks contradict each
    other or say too little."""
    every_vendor = {vendor: _said_by_device(row.devices, marks) for vendor, row in VENDORS.items()}
    said = {vendor: reasons for vendor, reasons in every_vendor.items() if reasons}
    if len(said) > 1:
        every = [f"{vendor}: {reason}" for vendor, reasons in said.items() for reason in reasons]
        return Identity("", "", ("its marks are of more than one vendor", *every))
    for vendor, reasons in said.items():
        if marks.api not in VENDORS[vendor].devices.apis:
            wanted = " or ".join(VENDORS[vendor].devices.apis)
            contrary = f"but it answers as {marks.api}, {vendor}'s as {wanted}"
            return Identity("", "", (*reasons, contrary))
        return Identity(vendor, _arch(VENDORS[vendor].devices, marks), tuple(reasons))
    if marks.pci:
        unknown = f"its PCI vendor is {marks.pci} and its name {marks.name!r}, which no vendor here has"
        return Identity("", "", (unknown,))
    sharing = [vendor for vendor, row in VENDORS.items() if marks.api in row.devices.apis]
    present = {vendor: own for vendor in sharing if (own := _own_libraries(VENDORS[vendor].devices, marks))}
    if len(present) > 1:
        found = ", ".join(f"{vendor}'s {own[0]}" for vendor, own in present.items())
        return Identity("", "", (f"nothing but libraries speaks, those of more than one vendor: {found}",))
    vendor, reason = sharing[0], f"it answers as {marks.api}, and nothing speaks for another vendor"
    if present:
        ((vendor, own),) = present.items()
        reason = f"this host has {vendor}'s library {own[0]}"
    elif VENDORS[vendor].devices.named:
        name = f"its name is {marks.name!r} and" if marks.name else "it shows no name, and"
        unknown = f"but {name} its PCI vendor cannot be read: no vendor here has such devices"
        return Identity("", "", (f"it answers as {marks.api}", unknown))
    return Identity(vendor, _arch(VENDORS[vendor].devices, marks), (reason,))


def _said_by_device(row: Devices, marks: Marks) -> list[str]:
    reasons = []
    if marks.pci in row.pci:
        reasons.append(f"its PCI vendor is {marks.pci}")
    if re.match(row.name, marks.name):
        reasons.append(f"its name is {marks.name}")
    if re.match(row.code, marks.code):
        reasons.append(f"its code is {marks.code.partition(':')[0]}")
    reasons += [f"torch bears the mark {mark}" for mark in marks.torch if mark in row.torch]
    return reasons


def _own_libraries(row: Devices, marks: Marks) -> list[str]:
    return [name for name in row.libraries if name in marks.libraries]


def _arch(row: Devices, marks: Marks) -> str:
    """The arch's name; for a device that no rule knows, what it says of itself, which no target is for."""
    if row.archs is not None and marks.capability in row.archs:
        return row.archs[marks.capability]
    if row.arch is not None:
        source, expression, filled = row.arch
        match = re.fullmatch(expression, getattr(marks, source) or marks.name)
        if match is not None:
            return match.expand(filled)
    return marks.code or (f"capability-{marks.capability}" if marks.capability else "unknown")
