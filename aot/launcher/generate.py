"""A target of the manifest -> the C text of its launch table, and the fixed sources it is compiled with.

Pure: reads nothing and runs nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...kernels.contract import COMPRESS_RATIOS, SPECIALISED_BLOCK_SIZE
from ...kernels.gpgpu.route import ALIGNED_FIELDS
from ...runtime.launchtable import table_digest
from ..errors import BuildError
from .ctext import array, c_string, offsets
from .staged import generate_staged_table
from .vendors import VENDORS, Vendor, c_text

MAX_PARAMETERS = 64
MAX_KERNELS = 4
ALIGNMENT = 16
MAX_GRID_Y = 65535
MAX_BLOCK = 1024


COMMON_SOURCES = ("error.c", "check.c", "call.c", "manifest.c", "plain.c", "ffi.c", "python.c", "torch.c")


def launch_table_digest(kernels: Sequence[Mapping[str, Any]], variants: Sequence[Mapping[str, Any]]) -> str:
    """The sha256 of the canonical JSON of {kernels, variants}: what ties a launcher to a manifest."""
    return table_digest({"kernels": list(kernels), "variants": list(variants)})


def vendor_of(target: Mapping[str, Any]) -> Vendor:
    """The C side of a target's vendor. Raises BuildError for a vendor without a launcher."""
    vendor = VENDORS.get(target["vendor"])
    if vendor is None:
        raise BuildError(
            f"{_name(target)}: no launcher for vendor {target['vendor']!r}; "
            f"wanted one of {', '.join(VENDORS)}"
        )
    return vendor


def generate_table(target: Mapping[str, Any]) -> str:
    """The C text that defines KVB_TABLE for one target of the manifest.

    Raises BuildError where the target holds something that a launcher cannot do.
    """
    vendor = vendor_of(target)
    if vendor.staged:
        return generate_staged_table(target, vendor.device_type, vendor.device_name)
    kernels: Sequence[Mapping[str, Any]] = target["kernels"]
    variants: Sequence[Mapping[str, Any]] = target["variants"]
    for kernel in kernels:
        _check_kernel(target, vendor, kernel)
    by_name = {kernel["name"]: index for index, kernel in enumerate(kernels)}
    for variant in variants:
        _check_variant(target, vendor, variant, {kernel["name"]: kernel for kernel in kernels})
    ratios = sorted({variant["ratio"] for variant in variants}) if variants else list(COMPRESS_RATIOS)
    if vendor.sources != VENDORS["cpu"].sources and not variants:
        raise BuildError(f"{_name(target)}: wanted one variant or more to launch, found none")
    _check_last(target, variants)
    blobs = sorted({kernel["blob"] for kernel in kernels})
    digest = launch_table_digest(kernels, variants)

    lines = ['#include "table.h"', "", "#include <dlpack/dlpack.h>", ""]
    sizes = {arg["field"]: arg["size"] for kernel in kernels for arg in kernel["args"]}
    sizes |= {field: 8 for field in ALIGNED_FIELDS}
    for field, size in sorted(sizes.items()):
        lines.append(f'_Static_assert(sizeof(((kvb_operands *)0)->{field}) == {size}, "{field}");')
    lines.append("")
    lines += array("const char *const", "blobs", [c_string(blob) for blob in blobs])
    for index, kernel in enumerate(kernels):
        lines += array("const uint16_t", f"arguments_{index}", offsets(a["field"] for a in kernel["args"]))
    warp = target["warp_size"]
    lines += array(
        "const kvb_kernel", "kernels",
        [_kernel(kernel, index, warp, blobs.index(kernel["blob"])) for index, kernel in enumerate(kernels)],
    )  # fmt: skip
    lines += array("const kvb_variant", "variants", [_variant(variant, by_name) for variant in variants])
    lines += array("const int64_t", "ratios", [str(ratio) for ratio in ratios])
    lines += array("const uint16_t", "aligned_fields", offsets(ALIGNED_FIELDS))
    members = {
        "target": c_string(_name(target)),
        "digest": c_string(digest),
        "device_type": vendor.device_type,
        "device_name": c_string(vendor.device_name) if vendor.device_name else "0",
        "elf_machine": str(target["elf_machine"]),
        "min_driver": str(target["min_driver"]),
        "needs_scratch": str(int(any(variant["scratch_per_output"] for variant in variants))),
        "aligned_block_size": str(SPECIALISED_BLOCK_SIZE),
        "aligned_mask": str(ALIGNMENT - 1),
        "num_blobs": str(len(blobs)),
        "num_kernels": str(len(kernels)),
        "num_variants": str(len(variants)),
        "num_ratios": str(len(ratios)),
        "num_aligned_fields": str(len(ALIGNED_FIELDS)),
        "blobs": "blobs" if blobs else "0",
        "kernels": "kernels" if kernels else "0",
        "variants": "variants" if variants else "0",
        "ratios": "ratios",
        "aligned_fields": "aligned_fields",
    }
    lines += ["const kvb_table KVB_TABLE = {"]
    lines += [f"  .{name} = {value}," for name, value in members.items()]
    lines += ["};", ""]
    if vendor.driver is not None:
        lines.append(c_text(vendor.driver))
    return "\n".join(lines)


def _name(target: Mapping[str, Any]) -> str:
    return f"{target['vendor']}:{target['arch']}"


def _kernel(kernel: Mapping[str, Any], index: int, warp_size: int, blob: int) -> str:
    members = {
        "name": c_string(kernel["name"]),
        "entry": c_string(kernel["entry"]),
        "blob": blob,
        "block": kernel["num_warps"] * warp_size,
        "shared": kernel["shared"],
        "cluster": kernel["cluster"],
        "per_output": kernel["grid"]["per_output"],
        "grid_y": kernel["grid"]["y"],
        "num_arguments": len(kernel["args"]),
        "num_hidden": kernel["hidden"],
        "arguments": f"arguments_{index}" if kernel["args"] else "0",
    }
    return "{" + ", ".join(f".{name} = {value}" for name, value in members.items()) + "}"


def _variant(variant: Mapping[str, Any], by_name: Mapping[str, int]) -> str:
    bound = variant["max_outputs"]
    members = {
        "ratio": variant["ratio"],
        "max_outputs": "INT64_MAX" if bound is None else bound,
        "scratch_per_output": variant["scratch_per_output"],
        "aligned": int(variant["layout"] == "aligned"),
        "num_kernels": len(variant["kernels"]),
        "kernels": "{" + ", ".join(str(by_name[name]) for name in variant["kernels"]) + "}",
    }
    return "{" + ", ".join(f".{name} = {value}" for name, value in members.items()) + "}"


def _check_kernel(target: Mapping[str, Any], vendor: Vendor, kernel: Mapping[str, Any]) -> None:
    where = f"{_name(target)}: kernel {kernel['name']}"
    for field in ("global_scratch", "profile_scratch"):
        if kernel[field] != 0:
            raise BuildError(
                f"{where}: {field}: wanted 0 bytes, because a launcher passes NULL for the compiler's hidden "
                f"pointers; found {kernel[field]}. Choose a tile config whose kernel needs none"
            )
    wanted = (
        ("cluster", kernel["cluster"] == 1 or vendor.clusters, "1 for this vendor"),
        (
            "num_warps",
            kernel["num_warps"] * target["warp_size"] <= MAX_BLOCK,
            f"at most {MAX_BLOCK} threads a block, {target['warp_size']} a warp",
        ),
        ("grid.y", 1 <= kernel["grid"]["y"] <= MAX_GRID_Y, f"1 to {MAX_GRID_Y}"),
        (
            "args and hidden",
            len(kernel["args"]) + kernel["hidden"] <= MAX_PARAMETERS,
            f"at most {MAX_PARAMETERS} together",
        ),
        (
            "assumes",
            dict(kernel["assumes"])
            == (
                {"block_size": SPECIALISED_BLOCK_SIZE, "alignment": ALIGNMENT}
                if kernel["layout"] == "aligned"
                else {"block_size": 0, "alignment": 0}
            ),
            f"what layout {kernel['layout']!r} means, which is all a launcher checks",
        ),
    )
    for field, right, text in wanted:
        if not right:
            raise BuildError(f"{where}: {field}: wanted {text}, found {_found(kernel, field)}")
    for arg in kernel["args"]:
        if not re.fullmatch(r"[a-z_][a-z0-9_]*", arg["field"]):
            raise BuildError(f"{where}: args: wanted a field of kvb_operands, found {arg['field']!r}")


def _found(kernel: Mapping[str, Any], field: str) -> str:
    if field == "grid.y":
        return str(kernel["grid"]["y"])
    if field == "args and hidden":
        return f"{len(kernel['args'])} and {kernel['hidden']}"
    return json.dumps(kernel[field])


def _check_variant(
    target: Mapping[str, Any],
    vendor: Vendor,
    variant: Mapping[str, Any],
    kernels: Mapping[str, Mapping[str, Any]],
) -> None:
    where = f"{_name(target)}: variant of ratio {variant['ratio']}, layout {variant['layout']}"
    if variant["scratch_per_output"] and not vendor.scratch:
        raise BuildError(
            f"{where}: wanted no scratch, because this vendor's driver is not known to allocate memory in a "
            f"stream's order; found {variant['scratch_per_output']} bytes an output. Choose tiles with "
            "block_d 512 and split 1"
        )
    if not 1 <= len(variant["kernels"]) <= MAX_KERNELS:
        raise BuildError(f"{where}: wanted 1 to {MAX_KERNELS} kernels, found {len(variant['kernels'])}")
    for name in variant["kernels"]:
        kernel = kernels.get(name)
        if kernel is None:
            raise BuildError(f"{where}: wanted kernels of the target, found {name!r}, which it does not have")
        if (kernel["ratio"], kernel["layout"]) != (variant["ratio"], variant["layout"]):
            raise BuildError(
                f"{where}: wanted kernels of the same ratio and layout, found {name} of ratio "
                f"{kernel['ratio']}, layout {kernel['layout']}"
            )


def _check_last(target: Mapping[str, Any], variants: Sequence[Mapping[str, Any]]) -> None:
    last = {variant["ratio"]: variant for variant in variants}
    for ratio, variant in last.items():
        if variant["layout"] != "general" or variant["max_outputs"] is not None:
            raise BuildError(
                f"{_name(target)}: the last variant of ratio {ratio}: wanted layout general and max_outputs "
                f"null, so that every call finds one; found {variant['layout']} and {variant['max_outputs']}"
            )
