"""Whose device this is: one row a vendor, and the decision from what a host shows of a device. Pure.

Five vendors' devices are `cuda` to torch and two are `hip`, some report a compute capability of NVIDIA's, and
one brings a library under the name of NVIDIA's. So nobody is taken at one word: a device's PCI vendor, its
name, its code's name and the build of torch that drives it must not contradict each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .strictjson import Node, field_names

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
    torch:      marks of the torch that drives it: of hip, maca, corex, hcu, ppu those that its build bears.
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
            name=at["name"].text(),
            capability=at["capability"].matching(_CAPABILITY, "a capability such as 8.0, or an empty string"),
            code=at["code"].text(),
            pci=at["pci"].matching(_PCI, "four hex digits such as 10de, or an empty string"),
            torch=at["torch"].each(Node.string),
            libraries=at["libraries"].each(Node.string),
        )

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in field_names(type(self))}
        return plain | {"torch": list(self.torch), "libraries": list(self.libraries)}


@dataclass(frozen=True)
class Vendor:
    """How one vendor's devices are told from others'.

    apis:      the interfaces that know them; of several vendors that share one, the first row is meant where
               nothing speaks for another.
    name:      what their names look like, from the start. code: what no other vendor's code is called.
    pci:       the vendor's PCI number. torch: the marks that only a torch built for it bears.
    libraries: what only its driver brings. drivers: the names its launchers look for its driver by, in order.
    archs:     the arch by compute capability. arch: where that says nothing, (field of Marks, expression,
               what is filled in from the expression's groups).
    distance:  how far an arch that code was built for lies from a device's other arch, or why that does not
               run; None where code runs on its own arch alone.
    version:   the driver's integer in words.
    """

    apis: tuple[str, ...]
    drivers: tuple[str, ...]
    name: str
    code: str = "(?!)"
    pci: tuple[str, ...] = ()
    torch: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    archs: Mapping[str, str] | None = None
    arch: tuple[str, str, str] | None = None
    distance: Callable[[str, str], int | str] | None = None
    version: Callable[[int], str] = str


@dataclass(frozen=True)
class Api:
    """An interface that knows devices.

    torch: what torch calls them. library, prefix: the library that is asked where torch does not tell, and
    how its functions' names begin; "" where there is none. kind: `contexts` for one that grew out of NVIDIA's
    driver interface, `devices` for one with a current device, `chip` for one that only names the chip.
    """

    torch: str
    library: str = ""
    prefix: str = ""
    kind: str = ""


APIS: Mapping[str, Api] = {
    "cuda": Api("cuda", "libcuda.so.1", "cu", "contexts"),
    "hip": Api("cuda"),
    "maca": Api("cuda", "libmcruntime.so", "mc", "devices"),
    "hggc": Api("cuda", "libhggc.so", "hg", "contexts"),
    "musa": Api("musa", "libmusa.so", "mu", "contexts"),
    "npu": Api("npu", "libascendcl.so", "aclrt", "chip"),
}


# From here on NVIDIA's code is specific to one arch; before it, a newer minor runs an older one's.
_FIRST_EXACT_MAJOR = 9


def _sm_distance(built: str, here: str) -> int | str:
    found = [re.fullmatch(r"sm_([0-9]+)([0-9])", arch) for arch in (built, here)]
    if not found[0] or not found[1]:
        return f"it is for {built} and no other arch, this device is {here}"
    (major, minor), (own_major, own_minor) = ((int(match[1]), int(match[2])) for match in found if match)
    if major >= _FIRST_EXACT_MAJOR:
        return f"its code for {built} runs on {built} alone, this device is {here}"
    if major != own_major or minor > own_minor:
        lowest = f"compute capability {major}.{minor} to {major}.9"
        return f"its code for {built} runs on {lowest}, this device has {own_major}.{own_minor}"
    return own_minor - minor


def _cuda_version(version: int) -> str:
    return f"API {version // 1000}.{version % 1000 // 10}"


_GFX = ("code", r"(gfx[0-9a-f]+(?::.*)?)", r"\1")

VENDORS: Mapping[str, Vendor] = {
    "nvidia": Vendor(
        ("cuda",), ("libcuda.so.1",), r"NVIDIA|GeForce|Tesla|Quadro|TITAN|RTX", pci=("10de",),
        arch=("capability", r"(\d+)\.(\d+)", r"sm_\1\2"), distance=_sm_distance, version=_cuda_version,
    ),
    "amd": Vendor(
        ("hip",), ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"), r"AMD|Radeon|Instinct",
        pci=("1002",), arch=_GFX,
    ),
    "hygon": Vendor(
        ("hip",), ("libgalaxyhip.so", "libgalaxyhip.so.5", "libamdhip64.so"), r"Hygon|HYGON|K100|Z100|BW\d",
        code=r"gfx(926|928|92a|936|938|946)\b", pci=("1d94",), torch=("hcu",),
        libraries=("libgalaxyhip.so",), arch=_GFX,
    ),
    "metax": Vendor(
        ("cuda", "maca"), ("libmcruntime.so",), r"MetaX|Metax|MXC", torch=("maca",),
        libraries=("libmcruntime.so",),
        archs={"8.0": "c500", "10.0": "c500", "8.6": "c600", "15.0": "c600"},
        arch=("name", r".*?C([56])\d\d\b.*", r"c\g<1>00"),
    ),
    "tianshu": Vendor(
        ("cuda",), ("libcuda.so.1",), r"Iluvatar|BI-V\d|MR-V\d", torch=("corex",),
        libraries=("libixthunk.so", "libixml.so"),
        archs={"7.0": "ivcore10", "7.1": "ivcore11", "8.0": "ivcore20"},
    ),
    "mthreads": Vendor(
        ("musa",), ("libmusa.so",), r"MTT|Moore Threads", pci=("1ed5",), libraries=("libmusa.so",),
        arch=("capability", r"(\d+)\.(\d+)", r"mp_\1\2"),
    ),
    "thead": Vendor(
        ("cuda", "hggc"), ("libhggc.so",), r"PPU-", torch=("ppu",), libraries=("libhggc.so",),
        archs={"8.0": "ppu001", "8.9": "ppu0015"},
    ),
    "ascend": Vendor(
        ("npu",), ("libascendcl.so",), r"Ascend", pci=("19e5",), libraries=("libascendcl.so",),
        arch=("code", r"Ascend(\w+)", r"\1"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """Whose device it is. vendor: "" where that cannot be said. arch: as a target names it, "" without a
    vendor. reasons: what the decision rests on, each a phrase."""

    vendor: str
    arch: str
    reasons: tuple[str, ...]


def libraries() -> tuple[str, ...]:
    """Every library whose presence says something."""
    return tuple(name for row in VENDORS.values() for name in row.libraries)


def torch_type(vendor: str) -> str:
    """What torch calls the vendor's devices: cuda, musa, npu."""
    return APIS[VENDORS[vendor].apis[0]].torch if vendor in VENDORS else "cuda"


def arch_distance(vendor: str, built: str, here: str) -> int | str:
    """0 where code was built for the device's arch, more for another that it runs on, else why it doesn't."""
    if built == here:
        return 0
    row = VENDORS.get(vendor)
    if row is None or row.distance is None:
        return f"it is for {built} and no other arch, this device is {here}"
    return row.distance(built, here)


def driver_words(vendor: str, version: int) -> str:
    """A driver's integer in words: API 12.8 for NVIDIA's 12080, the number itself for others."""
    return VENDORS[vendor].version(version) if vendor in VENDORS else str(version)


def identify(marks: Marks) -> Identity:
    """The vendor of a device and its arch, with the reasons; without a vendor where marks contradict each
    other or say too little."""
    said = {vendor: reasons for vendor, row in VENDORS.items() if (reasons := _said_by_device(row, marks))}
    if len(said) > 1:
        every = [f"{vendor}: {reason}" for vendor, reasons in said.items() for reason in reasons]
        return Identity("", "", ("its marks are of more than one vendor", *every))
    for vendor, reasons in said.items():
        if marks.api not in VENDORS[vendor].apis:
            wanted = " or ".join(VENDORS[vendor].apis)
            contrary = f"but it answers as {marks.api}, {vendor}'s as {wanted}"
            return Identity("", "", (*reasons, contrary))
        return Identity(vendor, _arch(VENDORS[vendor], marks), tuple(reasons))
    if marks.pci:
        unknown = f"its PCI vendor is {marks.pci} and its name {marks.name!r}, which no vendor here has"
        return Identity("", "", (unknown,))
    sharing = [vendor for vendor, row in VENDORS.items() if marks.api in row.apis]
    present = {vendor: own for vendor in sharing if (own := _own_libraries(VENDORS[vendor], marks))}
    if len(present) > 1:
        found = ", ".join(f"{vendor}'s {own[0]}" for vendor, own in present.items())
        return Identity("", "", (f"nothing but libraries speaks, those of more than one vendor: {found}",))
    vendor, reason = sharing[0], f"it answers as {marks.api}, and nothing speaks for another vendor"
    if present:
        ((vendor, own),) = present.items()
        reason = f"this host has {vendor}'s library {own[0]}"
    return Identity(vendor, _arch(VENDORS[vendor], marks), (reason,))


def _said_by_device(row: Vendor, marks: Marks) -> list[str]:
    reasons = []
    if marks.pci in row.pci:
        reasons.append(f"its PCI vendor is {marks.pci}")
    if re.match(row.name, marks.name):
        reasons.append(f"its name is {marks.name}")
    if re.match(row.code, marks.code):
        reasons.append(f"its code is {marks.code.partition(':')[0]}")
    reasons += [f"torch is built for {mark}" for mark in marks.torch if mark in row.torch]
    return reasons


def _own_libraries(row: Vendor, marks: Marks) -> list[str]:
    return [name for name in row.libraries if name in marks.libraries]


def _arch(row: Vendor, marks: Marks) -> str:
    """The arch's name; for a device that no rule knows, what it says of itself, which no target is for."""
    if row.archs is not None and marks.capability in row.archs:
        return row.archs[marks.capability]
    if row.arch is not None:
        source, expression, filled = row.arch
        match = re.fullmatch(expression, getattr(marks, source))
        if match is not None:
            return match.expand(filled)
    return marks.code or (f"capability-{marks.capability}" if marks.capability else "unknown")
