"""What differs between vendors in C: where their tensors live, which sources talk to their driver, and for a
driver that loads modules its row: the libraries and functions that driver_module.c calls.

One entry a vendor; nothing else about a vendor is written down on this side of the launcher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DEVICE_SOURCES = ("device.c", "dispatch.c", "library.c")
STAGED_SOURCES = ("device.c", "staged.c", "stream.c", "workspace.c", "library.c")


@dataclass(frozen=True)
class Driver:
    """A row for driver_module.c.

    libraries: names the driver library is looked for by, in that order. product: what brings it, for people.
    functions: the exported name of each role that module.h lists and the driver has. pools: the device
    attribute that says whether a device has memory pools, where scratch comes from a pool of our own.
    """

    libraries: tuple[str, ...]
    product: str
    functions: Mapping[str, str]
    pools: int = 0

    def c_text(self) -> str:
        """The C text that defines KVB_MODULE_DRIVER."""
        advice = (
            f"Install {self.product} on this host, or choose a target that this host has a device for"
        )
        lines = ['#include "module.h"', "", "static const char *const libraries[] = {"]
        lines += [f'  "{name}",' for name in self.libraries]
        lines += ["};", "", "const kvb_module_driver KVB_MODULE_DRIVER = {", "  .libraries = libraries,"]
        lines += [f"  .num_libraries = {len(self.libraries)},", f'  .advice = "{advice}",']
        lines += [f"  .pools = {self.pools},"]
        lines += [f'  .{role} = "{name}",' for role, name in sorted(self.functions.items())]
        return "\n".join([*lines, "};", ""])


@dataclass(frozen=True)
class Vendor:
    """device_type: the DLPack device type of tensors on its devices. sources: what its launchers are compiled
    from besides what all are. clusters: whether it launches thread-block clusters. driver: see Driver.
    device_name: what torch calls its devices, where DLPack's type is that of any extension device."""

    device_type: str
    sources: tuple[str, ...]
    clusters: bool = False
    driver: Driver | None = None
    device_name: str = ""

    @property
    def staged(self) -> bool:
        """Whether its launchers run pipelines of stages."""
        return self.sources[: len(STAGED_SOURCES)] == STAGED_SOURCES

    @property
    def scratch(self) -> bool:
        """Whether its launchers can take scratch memory."""
        if self.driver is None:
            return self.sources[: len(DEVICE_SOURCES)] == DEVICE_SOURCES
        return bool({"alloc", "pool_alloc"} & set(self.driver.functions))


def _named(prefix: str, names: Mapping[str, str], **others: str) -> dict[str, str]:
    return {**{role: prefix + name for role, name in names.items()}, **others}


# Two families of driver: those that grew out of HIP's interface keep a current device, those that grew out of
# CUDA's driver interface a current context.
_MODULES = {
    "init": "Init", "driver_version": "DriverGetVersion", "module_load": "ModuleLoadData",
    "module_unload": "ModuleUnload", "module_function": "ModuleGetFunction",
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
}  # fmt: skip


def _module_vendor(
    device_type: str,
    product: str,
    libraries: Sequence[str],
    functions: Mapping[str, str],
    pools: int = 0,
    device_name: str = "",
) -> Vendor:
    # The streams of extension devices do not come with their tensors.
    stream = ("stream.c",) if device_name else ()
    return Vendor(
        device_type,
        (*DEVICE_SOURCES, *stream, "driver_module.c"),
        driver=Driver(tuple(libraries), product, functions, pools),
        device_name=device_name,
    )


VENDORS: Mapping[str, Vendor] = {
    "nvidia": Vendor("kDLCUDA", (*DEVICE_SOURCES, "driver_cuda.c"), clusters=True),
    "amd": _module_vendor(
        "kDLROCM", "ROCm's HIP runtime",
        ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"),
        _named(
            "hip", _DEVICES, device_attribute="hipDeviceGetAttribute", pool_create="hipMemPoolCreate",
            pool_set="hipMemPoolSetAttribute", pool_destroy="hipMemPoolDestroy",
            pool_alloc="hipMallocFromPoolAsync", free="hipFreeAsync",
        ),
        pools=88,
    ),
    # HIP as DTK ships it; torch is a ROCm build there. Attribute numbers differ between HIP versions, so that
    # scratch comes from the device's default pool, which needs none.
    "hygon": _module_vendor(
        "kDLROCM", "Hygon's DTK",
        ("libgalaxyhip.so", "libgalaxyhip.so.5", "libamdhip64.so"),
        _named("hip", _DEVICES, alloc="hipMallocAsync", free="hipFreeAsync"),
    ),
    "metax": _module_vendor(
        "kDLCUDA", "MetaX's MACA runtime", ("libmcruntime.so",),
        _named("mc", _DEVICES, alloc="mcMallocAsync", free="mcFreeAsync"),
    ),
    # CoreX's own library under NVIDIA's name. No public source shows it allocating in a stream's order.
    "tianshu": _module_vendor("kDLCUDA", "Iluvatar's CoreX", ("libcuda.so.1",), _named("cu", _CONTEXTS)),
    # torch_musa's devices are DLPack's extension devices. muMemFreeAsync is declared, and was found without
    # an implementation in releases up to 4.3.
    "mthreads": _module_vendor(
        "kDLExtDev", "Moore Threads' MUSA driver", ("libmusa.so",),
        _named("mu", _CONTEXTS, context_release="muDevicePrimaryCtxRelease_v2"), device_name="musa",
    ),
    "thead": _module_vendor(
        "kDLCUDA", "T-Head's PPU driver", ("libhggc.so",),
        _named(
            "hg", _CONTEXTS, context_release="hgDevicePrimaryCtxRelease_v2", alloc="hgMemAllocAsync",
            free="hgMemFreeAsync",
        ),
    ),
    # torch_npu's devices are DLPack's extension devices.
    "ascend": Vendor("kDLExtDev", (*STAGED_SOURCES, "driver_acl.c", "acl_gather.c"), device_name="npu"),
    "cpu": Vendor("kDLCPU", ("host.c",)),
}  # fmt: skip
