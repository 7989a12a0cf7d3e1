"""What vendors differ in beside how code is compiled for them: one row each, of its driver and its devices.

Two read it. A launcher is generated from the driver's part (aot/launcher); the runtime asks the driver by it,
and tells by the devices' part whose device it sees (identity.py). How code is compiled is in aot/targets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Driver:
    """A vendor's driver library.

    tensors:   the DLPack device type of tensors on its devices. extension: what torch calls them where that
               type is any extension device's.
    product:   what brings it, for people. libraries: the names it is looked for by, in that order.
    functions: the exported name of each role that the driver has: of those that launchers call (module.h in
               aot/launcher lists them) and of ASKED.
    pools:     the device attribute that says whether a device has memory pools, where scratch comes from a
               pool of our own.
    setup:     what a person does so that its libraries are found, where installing is not all.
    stream:    for extension devices, (module, part, function) of torch's extension that tells the calling
               thread's stream on a device.
    """

    tensors: str
    product: str
    libraries: tuple[str, ...]
    functions: Mapping[str, str]
    pools: int = 0
    extension: str = ""
    setup: str = ""
    stream: tuple[str, str, str] | None = None


# Roles of functions that the runtime asks about devices and no launcher calls.
ASKED = ("device_name", "device_property", "context_device", "chip_name")


@dataclass(frozen=True)
class Devices:
    """How a vendor's devices are told from others'.

    apis:      the interfaces that know them; of several vendors that share one, the first row is meant where
               nothing speaks for another.
    name:      what their names look like, from the start. code: what no other vendor's code is called.
    named:     whether each of its devices has such a name or the vendor's PCI number, so that one that has
               neither is another's.
    pci:       the vendor's PCI number. torch: what only a torch built for it has: an attribute's path, and
               behind an = what the attribute's text holds.
    libraries: what only its driver brings.
    archs:     the arch by compute capability. arch: where that says nothing, (field of Marks, or where it is
               empty the name, expression, what is filled in from the expression's groups).
    built:     the archs that kvbuild compiles for; none where nobody said.
    distance:  how far an arch that code was built for lies from a device's other arch, or why that does not
               run; None where code runs on its own arch alone.
    version:   the driver's integer in words.
    """

    apis: tuple[str, ...]
    name: str
    code: str = "(?!)"
    named: bool = False
    pci: tuple[str, ...] = ()
    torch: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    archs: Mapping[str, str] | None = None
    arch: tuple[str, str, str] | None = None
    built: tuple[str, ...] = ()
    distance: Callable[[str, str], int | str] | None = None
    version: Callable[[int], str] = str


@dataclass(frozen=True)
class Vendor:
    driver: Driver
    devices: Devices


@dataclass(frozen=True)
class Api:
    """An interface that knows devices. torch: what torch calls them. vendor: whose driver is asked where
    torch does not tell; "" where none is."""

    torch: str
    vendor: str = ""

    @property
    def driver(self) -> Driver | None:
        return VENDORS[self.vendor].driver if self.vendor else None


APIS: Mapping[str, Api] = {
    "cuda": Api("cuda", "nvidia"),
    "hip": Api("cuda"),
    "maca": Api("cuda", "metax"),
    "hggc": Api("cuda", "thead"),
    "musa": Api("musa", "mthreads"),
    "npu": Api("npu", "ascend"),
}


def _named(prefix: str, names: Mapping[str, str], **others: str) -> dict[str, str]:
    return {**{role: prefix + name for role, name in names.items()}, **others}


# Two families of driver: those that grew out of HIP's interface keep a current device, those that grew out of
# CUDA's driver interface a current context.
_MODULES = {
    "init": "Init", "driver_version": "DriverGetVersion", "module_load": "ModuleLoadData",
    "module_unload": "ModuleUnload", "module_function": "ModuleGetFunction", "device_name": "DeviceGetName",
}  # fmt: skip
_DEVICES = {
    **_MODULES, "device_count": "GetDeviceCount", "device_current": "GetDevice", "device_choose": "SetDevice",
    "launch": "ModuleLaunchKernel", "error_name": "GetErrorName", "error_string": "GetErrorString",
}  # fmt: skip
_CONTEXTS = {
    **_MODULES, "device_count": "DeviceGetCount", "device_handle": "DeviceGet",
    "context_retain": "DevicePrimaryCtxRetain", "context_release": "DevicePrimaryCtxRelease",
    "context_current": "CtxGetCurrent", "context_choose": "CtxSetCurrent", "launch": "LaunchKernel",
    "error_name_into": "GetErrorName", "error_string_into": "GetErrorString",
    "device_property": "DeviceGetAttribute", "context_device": "CtxGetDevice",
}  # fmt: skip

# From here on NVIDIA's code is specific to one arch; before it, a newer minor runs an older one's.
_FIRST_EXACT_MAJOR = 9


def _sm_distance(built: str, here: str) -> int | str:
    found = [re.fullmatch(r"sm_([0-9]{1,3})([0-9])", arch) for arch in (built, here)]
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
        Driver("kDLCUDA", "NVIDIA's driver", ("libcuda.so.1",), _named("cu", _CONTEXTS)),
        Devices(
            ("cuda",), r"NVIDIA|GeForce|Tesla|Quadro|TITAN|GRID|RTX|Graphics Device", named=True,
            pci=("10de",),
            arch=("capability", r"(\d+)\.(\d+)", r"sm_\1\2"), distance=_sm_distance, version=_cuda_version,
            built=("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"),
        ),
    ),
    "amd": Vendor(
        Driver(
            "kDLROCM", "ROCm's HIP runtime",
            ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"),
            _named(
                "hip", _DEVICES, device_attribute="hipDeviceGetAttribute", pool_create="hipMemPoolCreate",
                pool_set="hipMemPoolSetAttribute", pool_destroy="hipMemPoolDestroy",
                pool_alloc="hipMallocFromPoolAsync", free="hipFreeAsync",
            ),
            pools=88,
        ),
        Devices(
            ("hip",), r"AMD|Radeon|Instinct", pci=("1002",), arch=_GFX,
            built=("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"),
        ),
    ),
    # HIP as DTK ships it; torch is a ROCm build there. Attribute numbers differ between HIP versions, so that
    # scratch comes from the device's default pool, which needs none.
    "hygon": Vendor(
        Driver(
            "kDLROCM", "Hygon's DTK", ("libgalaxyhip.so", "libgalaxyhip.so.5", "libamdhip64.so"),
            _named("hip", _DEVICES, alloc="hipMallocAsync", free="hipFreeAsync"),
        ),
        Devices(
            ("hip",), r"Hygon|HYGON|K100|Z100|BW\d", code=r"gfx(926|928|92a|936|938|946)\b", pci=("1d94",),
            torch=("__hcu_version__",), libraries=("libgalaxyhip.so",), arch=_GFX,
            built=("gfx906", "gfx926", "gfx928", "gfx936", "gfx938"),
        ),
    ),
    "metax": Vendor(
        Driver(
            "kDLCUDA", "MetaX's MACA runtime", ("libmcruntime.so",),
            _named("mc", _DEVICES, alloc="mcMallocAsync", free="mcFreeAsync"),
        ),
        Devices(
            ("cuda", "maca"), r"MetaX|Metax|MXC", torch=("version.maca",), libraries=("libmcruntime.so",),
            archs={"8.0": "c500", "10.0": "c500", "8.6": "c600", "15.0": "c600"},
            arch=("name", r".*?C([56])\d\d\b.*", r"c\g<1>00"), built=("c500", "c600"),
        ),
    ),
    # CoreX's own library under NVIDIA's name. No public source shows it allocating in a stream's order.
    "tianshu": Vendor(
        Driver("kDLCUDA", "Iluvatar's CoreX", ("libcuda.so.1",), _named("cu", _CONTEXTS)),
        Devices(
            ("cuda",), r"Iluvatar|BI-V\d|MR-V\d", torch=("corex",),
            libraries=("libixthunk.so", "libixml.so"),
            archs={"7.0": "ivcore10", "7.1": "ivcore11", "8.0": "ivcore20"},
            built=("ivcore10", "ivcore11", "ivcore20"),
        ),
    ),
    # torch_musa's devices are DLPack's extension devices. muMemFreeAsync is declared, and was found without
    # an implementation in releases up to 4.3.
    "mthreads": Vendor(
        Driver(
            "kDLExtDev", "Moore Threads' MUSA driver", ("libmusa.so",),
            _named("mu", _CONTEXTS, context_release="muDevicePrimaryCtxRelease_v2"), extension="musa",
            stream=("torch_musa", "_MUSAC", "_musa_getCurrentRawStream"),
        ),
        Devices(
            ("musa",), r"MTT|Moore Threads", pci=("1ed5",), libraries=("libmusa.so",),
            arch=("capability", r"(\d+)\.(\d+)", r"mp_\1\2"), built=("mp_21", "mp_22", "mp_31"),
        ),
    ),
    "thead": Vendor(
        Driver(
            "kDLCUDA", "T-Head's PPU driver", ("libhggc.so",),
            _named(
                "hg", _CONTEXTS, context_release="hgDevicePrimaryCtxRelease_v2", alloc="hgMemAllocAsync",
                free="hgMemFreeAsync",
            ),
        ),
        Devices(
            ("cuda", "hggc"), r"PPU-", torch=("__version__=ppu",), libraries=("libhggc.so",),
            archs={"8.0": "ppu001", "8.9": "ppu0015"}, built=("ppu001", "ppu0015"),
        ),
    ),
    # torch_npu's devices are DLPack's extension devices.
    "ascend": Vendor(
        Driver(
            "kDLExtDev", "Ascend's CANN", ("libascendcl.so",), {"chip_name": "aclrtGetSocName"},
            extension="npu", setup="source /usr/local/Ascend/ascend-toolkit/set_env.sh",
            stream=("torch_npu", "_C", "_npu_getCurrentRawStream"),
        ),
        Devices(
            ("npu",), r"Ascend", pci=("19e5",), libraries=("libascendcl.so",),
            arch=("code", r"Ascend([\w-]+)", r"\1"), built=("910B1", "910B2", "910B3", "910B4"),
        ),
    ),
}  # fmt: skip


def libraries() -> tuple[str, ...]:
    """Every library whose presence says something."""
    return tuple(name for row in VENDORS.values() for name in row.devices.libraries)


def torch_marks() -> tuple[str, ...]:
    """Every mark of a torch build that says something; a build for HIP is AMD's as much as Hygon's."""
    return ("version.hip", *(mark for row in VENDORS.values() for mark in row.devices.torch))


def torch_type(vendor: str) -> str:
    """What torch calls the vendor's devices: cuda, musa, npu."""
    return APIS[VENDORS[vendor].devices.apis[0]].torch if vendor in VENDORS else "cuda"


def arch_distance(vendor: str, built: str, here: str) -> int | str:
    """0 where code was built for the device's arch, more for another that it runs on, else why it doesn't."""
    if built == here:
        return 0
    row = VENDORS.get(vendor)
    if row is None or row.devices.distance is None:
        return f"it is for {built} and no other arch, this device is {here}"
    return row.devices.distance(built, here)


def driver_words(vendor: str, version: int) -> str:
    """A driver's integer in words: API 12.8 for NVIDIA's 12080, the number itself for others."""
    return VENDORS[vendor].devices.version(version) if vendor in VENDORS else str(version)
