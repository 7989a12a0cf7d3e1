"""How a launcher of each vendor is put together: which sources talk to its driver, and the C text of the row
of one that loads modules. What vendors' drivers differ in is in runtime/vendors.py, one row a vendor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...runtime import vendors
from ...runtime.vendors import ASKED, Driver

DEVICE_SOURCES = ("device.c", "dispatch.c", "library.c")
STAGED_SOURCES = ("device.c", "staged.c", "stream.c", "workspace.c", "library.c")


# Drivers that are no mere loaders of modules have sources of their own.
_OWN_SOURCES: Mapping[str, tuple[str, ...]] = {
    "nvidia": (*DEVICE_SOURCES, "driver_cuda.c"),
    "ascend": (*STAGED_SOURCES, "driver_acl.c", "acl_gather.c"),
}
_WITH_CLUSTERS = ("nvidia",)


def c_text(driver: Driver) -> str:
    """The C text that defines KVB_MODULE_DRIVER."""
    advice = f"Install {driver.product} on this host, or choose a target that this host has a device for"
    lines = ['#include "module.h"', "", "static const char *const libraries[] = {"]
    lines += [f'  "{name}",' for name in driver.libraries]
    lines += ["};", "", "const kvb_module_driver KVB_MODULE_DRIVER = {", "  .libraries = libraries,"]
    lines += [f"  .num_libraries = {len(driver.libraries)},", f'  .advice = "{advice}",']
    lines += [f"  .pools = {driver.pools},"]
    roles = sorted((role, name) for role, name in driver.functions.items() if role not in ASKED)
    lines += [f'  .{role} = "{name}",' for role, name in roles]
    return "\n".join([*lines, "};", ""])


@dataclass(frozen=True)
class Vendor:
    """device_type: the DLPack device type of tensors on its devices. sources: what its launchers are compiled
    from besides what all are. clusters: whether it launches thread-block clusters. driver: its row, where
    driver_module.c serves it.
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


def _vendor(name: str, driver: Driver) -> Vendor:
    if name in _OWN_SOURCES:
        own = _OWN_SOURCES[name]
        return Vendor(driver.tensors, own, name in _WITH_CLUSTERS, device_name=driver.extension)
    # The streams of extension devices do not come with their tensors.
    stream = ("stream.c",) if driver.extension else ()
    sources = (*DEVICE_SOURCES, *stream, "driver_module.c")
    return Vendor(driver.tensors, sources, driver=driver, device_name=driver.extension)


VENDORS: Mapping[str, Vendor] = {
    **{name: _vendor(name, row.driver) for name, row in vendors.VENDORS.items()},
    "cpu": Vendor("kDLCPU", ("host.c",)),
}
