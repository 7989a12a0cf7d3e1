"""The launchers of the vendors whose driver loads modules, each against a stand-in for its library.

What they launch comes the builder's own way: planned by the vendor's tuning tables, and made-up binaries
checked and assembled as the compiler's would be.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import binaries
import harness
import pytest

from kvbuild.aot import plan as planning
from kvbuild.aot import spec, targets, tuning
from kvbuild.aot.assemble import assemble, check
from kvbuild.aot.errors import BuildError
from kvbuild.aot.launcher import build_launcher, generate, zig
from kvbuild.aot.pool import Compiled
from kvbuild.aot.spec import TargetName
from kvbuild.kernels.gpgpu import route

CUDA, ROCM, EXTENSION = 2, 10, 12
SHARED = {"compress_scan": 0, "compress_finalize": 96, "compress_fused": 2048}


@dataclass(frozen=True)
class Case:
    """A vendor as its driver is known: an arch, a Triton it has, where tensors live, its driver's library
    and stand-in, some of its functions, what it calls running out of memory, how its devices are shown."""

    arch: str
    triton: str
    device_type: int
    library: str
    source: str
    launch: str
    load: str
    unload: str
    alloc: str | None
    free: str | None
    error: str
    place: str


CASES = {
    "hygon": Case(
        "gfx936", "3.0.0", ROCM, "libgalaxyhip.so", "hip.c", "hipModuleLaunchKernel", "hipModuleLoadData",
        "hipModuleUnload", "hipMallocAsync", "hipFreeAsync", "hipErrorOutOfMemory", "rocm",
    ),
    "metax": Case(
        "c500", "3.6.0", CUDA, "libmcruntime.so", "maca.c", "mcModuleLaunchKernel", "mcModuleLoadData",
        "mcModuleUnload", "mcMallocAsync", "mcFreeAsync", "mcErrorOutOfMemory", "cuda",
    ),
    "tianshu": Case(
        "ivcore11", "3.1.0", CUDA, "libcuda.so.1", "corex.c", "cuLaunchKernel", "cuModuleLoadData",
        "cuModuleUnload", None, None, "CUDA_ERROR_OUT_OF_MEMORY", "cuda",
    ),
    "mthreads": Case(
        "mp_22", "3.2.0", EXTENSION, "libmusa.so", "musa.c", "muLaunchKernel", "muModuleLoadData",
        "muModuleUnload", None, None, "MUSA_ERROR_OUT_OF_MEMORY", "musa",
    ),
    "thead": Case(
        "ppu001", "3.6.0", CUDA, "libhggc.so", "hggc.c", "hgLaunchKernel", "hgModuleLoadData",
        "hgModuleUnload", "hgMemAllocAsync", "hgMemFreeAsync", "HGGC_ERROR_OUT_OF_MEMORY", "cuda",
    ),
}  # fmt: skip
HIDDEN = {"3.0.0": 0, "3.1.0": 0, "3.2.0": 0, "3.4.0": 1, "3.6.0": 2}
WITH_SCRATCH = [vendor for vendor, case in CASES.items() if case.alloc]
SIZES = {"i64": 8, "i32": 4, "fp32": 4}


@functools.cache
def target_of(vendor: str, arch: str, triton: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest's target for made-up binaries of that Triton, without launchers, and its blobs."""
    module, name = targets.load(vendor), TargetName(vendor, arch)
    facts = planning.Facts(
        tables={name: tuning.load(vendor, arch)},
        versions={vendor: {**dict.fromkeys(module.TOOLS, "1.0"), "triton": triton}},
        commands={vendor: ("python",)},
        zig="0.17",
        cpu_sources=(),
        read=lambda path: f"text of {path}",
        recipe="r",
    )
    (planned,) = planning.plan(spec.load(spec.PACKAGED), [name], facts).targets
    artifacts = {}
    for kernel in planned.kernels:
        unit = kernel.unit
        data = binaries.made_up(vendor, unit.function, unit.signature, HIDDEN[triton], unit.key)
        told = {
            "entry": unit.function, "shared": SHARED[unit.function],
            "num_warps": dict(unit.options)["num_warps"], "num_ctas": 1, "global_scratch": 0,
            "profile_scratch": 0,
        }  # fmt: skip
        artifacts[unit.key] = check(Compiled(unit, data, told, 0.0))
    target = assemble(planned, artifacts).target
    assert target is not None
    return target.to_json(), {artifact.blob: artifact.data for artifact in artifacts.values()}


@pytest.fixture(params=CASES)
def vendor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@functools.cache
def built(vendor: str, root: Path) -> tuple[harness.Bench, Path]:
    """A vendor's launcher, and the folder of its stand-in driver; once a process."""
    case = CASES[vendor]
    folder = root / f"module-{vendor}"
    bench = harness.Bench.build(*target_of(vendor, case.arch, case.triton), folder)
    harness.SONAMES[vendor] = (case.source, case.library)
    return bench, harness.build_standin(vendor, folder / "driver", root / "cache")


@pytest.fixture
def bench(vendor: str, session_folder: Path, worker_id: str) -> tuple[harness.Bench, Path]:
    folder = session_folder / worker_id
    return built(vendor, folder)


@pytest.fixture
def run(vendor: str, bench: tuple[harness.Bench, Path], tmp_path: Path) -> Any:
    """run(scenario, **settings of the driver), with PLACE for the vendor's device 0 and OTHER for 1."""
    kernel = bench[0].target["kernels"][0]
    sizes = [str(arg["size"]) for arg in kernel["args"]] + ["8"] * kernel["hidden"]

    def scenario(text: str, **settings: str) -> tuple[Any, list[dict[str, Any]]]:
        kind = CASES[vendor].device_type
        places = f"PLACE, OTHER = ({kind}, 0), ({kind}, 1)\n"
        given = {"KVB_STANDIN_ARGS": ",".join(sizes), **settings}
        return bench[0].run(places + harness.textwrap.dedent(text), tmp_path, bench[1], **given)

    return scenario


def variant_of(target: Mapping[str, Any], ratio: int, layout: str, num_outputs: int) -> dict[str, Any]:
    """What a launcher chooses, by the manifest's own words."""
    for variant in target["variants"]:
        limit = variant["max_outputs"]
        fits = limit is None or num_outputs <= limit
        if fits and (variant["ratio"], variant["layout"]) == (ratio, layout):
            return dict(variant)
    raise AssertionError


def expected_arguments(weight_is_fp32: int, scratch: int, num_outputs: int, hidden: int) -> list[str]:
    """The bytes of each argument for client.operands, by the operands' contract."""
    values: dict[str, tuple[str, Any]] = {
        "state_cache": ("<Q", 0x100000), "token_to_req": ("<Q", 0x200004), "positions": ("<Q", 0x300008),
        "boundary_token_indices": ("<Q", 0x400008), "block_table": ("<Q", 0x500004),
        "rms_norm_weight": ("<Q", 0x600010), "cos_sin_cache": ("<Q", 0x700010),
        "kv_slot_mapping": ("<Q", 0x800008), "kv_cache": ("<Q", 0x900010), "scratch": ("<Q", scratch),
        "num_blocks": ("<q", 5), "state_page_stride": ("<q", 8208), "state_row_stride": ("<q", 1024),
        "block_size": ("<q", 8), "num_tokens": ("<q", 7), "num_outputs": ("<q", num_outputs),
        "num_reqs": ("<q", 2), "blocks_per_req": ("<q", 6), "block_table_stride": ("<q", 9),
        "max_pos": ("<q", 11), "cos_sin_stride": ("<q", 80), "kv_pages": ("<q", 3),
        "kv_page_stride": ("<q", 37456), "weight_is_fp32": ("<i", weight_is_fp32),
        "rms_norm_eps": ("<f", 1e-6),
    }  # fmt: skip
    packed = [struct.pack(*values[arg.field]).hex() for arg in route.ARGS]
    return packed + ["00" * 8] * hidden


@pytest.mark.parametrize("ratio", [128, 256, 512])
@pytest.mark.parametrize("layout", ["aligned", "general"])
def test_every_launch_is_what_the_manifest_says(
    vendor: str, run: Any, bench: tuple[harness.Bench, Path], ratio: int, layout: str
) -> None:
    case, target = CASES[vendor], bench[0].target
    wide = 'rms_norm_weight=tensor((512,), "float32", 0x600010, None, PLACE)' if layout == "general" else ""
    said, calls = run(
        f"kvb.open(); say(kvb.compress(operands(PLACE, 3, compress_ratio={ratio}, {wide}), 77))"
    )
    assert said is None
    variant = variant_of(target, ratio, layout, 3)
    kernels = {kernel["name"]: kernel for kernel in target["kernels"]}
    launches = harness.launches(calls)
    assert [launch["name"] for launch in launches] == [kernels[name]["entry"] for name in variant["kernels"]]
    scratch = 0x5C0000 if variant["scratch_per_output"] else 0
    arguments = expected_arguments(int(layout == "general"), scratch, 3, HIDDEN[case.triton])
    for launch, name in zip(launches, variant["kernels"], strict=True):
        kernel = kernels[name]
        assert launch["by"] == case.launch
        assert launch["grid"] == [3 * kernel["grid"]["per_output"], 1, 1]
        assert launch["block"] == [kernel["num_warps"] * target["warp_size"], 1, 1]
        assert (launch["shared"], launch["stream"]) == (SHARED[kernel["entry"]], 77)
        assert launch["arguments"] == arguments
        assert kernel["hidden"] == HIDDEN[case.triton]
    if variant["scratch_per_output"]:
        around = harness.names(calls, case.alloc or "", "launch", case.free or "")
        assert around == [case.alloc, *["launch"] * len(launches), case.free]
        taken = next(call for call in calls if call["call"] == case.alloc)
        assert (taken["bytes"], taken["stream"]) == (3 * variant["scratch_per_output"], 77)


def test_everything_is_loaded_in_open(vendor: str, run: Any, bench: tuple[harness.Bench, Path]) -> None:
    _, calls = run("kvb.open(); say(kvb.compress(operands(PLACE)))")
    after = calls[calls.index(harness.launches(calls)[0]) :]
    load = CASES[vendor].load
    assert harness.names(after, load) == []
    assert harness.names(calls, load) == [load] * len(bench[0].blobs)
    loaded = [call for call in calls if call["call"] == load]
    assert {call["magic"] for call in loaded} == {0x7F}, "what the driver is given is ELF, never a container"


def test_another_device_is_current_around_what_needs_it(vendor: str, run: Any) -> None:
    said, calls = run("say([kvb.open(1), kvb.compress(operands(OTHER)), kvb.close(1)])")
    assert said == [None, None, None]
    keeps_devices = "device" in harness.launches(calls)[0]
    place, mine, before = ("device", 1, 0) if keeps_devices else ("context", 0xC1, 0)
    case = CASES[vendor]
    needing = [call for call in calls if call["call"] in ("launch", case.load, case.unload)]
    assert {call[place] for call in needing} == {mine}
    at = calls.index(harness.launches(calls)[0])
    chosen = [call[place] for call in calls if call["call"].endswith(("SetDevice", "CtxSetCurrent"))]
    assert chosen == [mine, before] * 3, "open, compress and close each put back what was there"
    assert calls[at]["call"] == "launch"


def test_what_is_current_already_stays(vendor: str, run: Any) -> None:
    case = CASES[vendor]
    if vendor in ("hygon", "metax"):
        _, calls = run("say([kvb.open(0), kvb.compress(operands(PLACE))])")
        assert [call for call in calls if call["call"].endswith("SetDevice")] == []
        return
    prefix = case.launch[:2]
    _, calls = run(
        f"""
        driver = ctypes.CDLL("{case.library}")
        kvb.open()
        driver.{prefix}CtxSetCurrent(ctypes.c_void_p(0xC0))
        say(kvb.compress(operands(PLACE)))
        """
    )
    last = [call for call in calls if call["call"].endswith("CtxSetCurrent")][-1]
    assert calls.index(last) < calls.index(harness.launches(calls)[0]), "the caller's own is the last"


@pytest.mark.parametrize("step", ["Init", "Count", "Load", "Function", "Choose"])
def test_open_says_what_the_driver_said_and_leaves_nothing(vendor: str, run: Any, step: str) -> None:
    case = CASES[vendor]
    prefix = case.launch[: 3 if vendor == "hygon" else 2]
    devices = vendor in ("hygon", "metax")
    function = {
        "Init": "Init", "Count": "GetDeviceCount" if devices else "DeviceGetCount",
        "Load": "ModuleLoadData@2", "Function": "ModuleGetFunction@3",
        "Choose": "SetDevice" if devices else "CtxSetCurrent",
    }[step]  # fmt: skip
    said, calls = run(
        "say([kvb.open(1), kvb.compress(operands(OTHER))])", KVB_STANDIN_FAIL=f"{prefix}{function}=2"
    )
    name = f"{prefix}{function}".split("@")[0]
    assert said[0] == [3, f"DeviceError: {name}: {case.error} (2): out of memory"]
    assert said[1][1].startswith(f"DeviceError: compress: {case.place}:1 is not open")
    done = [call["call"] for call in calls if "failed" not in call]
    assert done.count(case.load) == done.count(case.unload)
    assert len([c for c in done if "CtxRetain" in c]) == len([c for c in done if "CtxRelease" in c])


def test_compress_says_what_the_driver_said(vendor: str, run: Any) -> None:
    case = CASES[vendor]
    said, _ = run("kvb.open(); say(kvb.compress(operands(PLACE)))", KVB_STANDIN_FAIL=f"{case.launch}=2")
    assert said == [3, f"DeviceError: {case.launch}: {case.error} (2): out of memory"]
    said, _ = run("kvb.open(); say(kvb.compress(operands(PLACE)))", KVB_STANDIN_FAIL=f"{case.launch}=999")
    assert said == [3, f"DeviceError: {case.launch}: unknown error (999): the driver has no words for it"]


@pytest.mark.parametrize("vendor", WITH_SCRATCH, indirect=True)
@pytest.mark.parametrize("nth", [1, 2])
def test_scratch_goes_back_where_a_launch_fails(vendor: str, run: Any, nth: int) -> None:
    case = CASES[vendor]
    said, calls = run(
        "kvb.open(); say(kvb.compress(operands(PLACE, compress_ratio=512), 9))",
        KVB_STANDIN_FAIL=f"{case.launch}@{nth}=700",
    )
    assert said[0] == 3 and "an illegal memory access was encountered" in said[1]
    freed = [call for call in calls if call["call"] == case.free]
    assert freed == [{"call": case.free, "address": 0x5C0000, "stream": 9}]


@pytest.mark.parametrize("vendor", ["mthreads"], indirect=True)
def test_the_stream_of_an_extension_device_is_told(vendor: str, run: Any) -> None:
    """Its framework hands none on with its tensors."""
    said, calls = run(
        """
        class Any_(ctypes.Structure):
            _fields_ = (("type_index", ctypes.c_int32), ("pad", ctypes.c_uint32), ("value", ctypes.c_int64))
        def use_stream(*values):
            arguments, result = (Any_ * 2)(*(Any_(1, 0, value) for value in values)), Any_()
            use = kvb.library["__tvm_ffi_use_stream"]
            return use(None, ctypes.byref(arguments), 2, ctypes.byref(result))
        kvb.open(); kvb.open(1)
        said = [kvb.compress(operands(PLACE)), use_stream(0, 41), kvb.compress(operands(PLACE))]
        said += [kvb.compress(operands(PLACE), 5), kvb.compress(operands(OTHER))]
        say(said)
        """
    )
    assert said == [None, 0, None, None, None]
    assert [launch["stream"] for launch in harness.launches(calls)] == [0, 41, 5, 0]


def test_missing_library_is_named(vendor: str, bench: tuple[harness.Bench, Path], tmp_path: Path) -> None:
    said, _ = bench[0].run("say(kvb.open())", tmp_path)
    if said is None:
        pytest.skip("this machine has that driver")
    library = CASES[vendor].library
    assert said[0] == 3
    assert said[1].startswith(f"DeviceError: {library}: {library}: cannot open shared object file")
    assert said[1].endswith("on this host, or choose a target that this host has a device for")


@pytest.mark.parametrize(
    ("vendor", "role"),
    [*((vendor, "LAUNCH") for vendor in CASES), *((vendor, "ALLOC") for vendor in WITH_SCRATCH)],
    indirect=["vendor"],
)
def test_missing_function_is_named(
    vendor: str, bench: tuple[harness.Bench, Path], tmp_path: Path, session_folder: Path, role: str
) -> None:
    case = CASES[vendor]
    change = "-DWITHOUT_ALLOC" if role == "ALLOC" else f"-D{case.launch}=anotherName"
    old = harness.build_standin(vendor, tmp_path / "old", session_folder / "cache", change)
    said, calls = bench[0].run("say(kvb.open())", tmp_path, old)
    missing = case.alloc if role == "ALLOC" else case.launch
    assert said == [
        3, f"DeviceError: {case.library}: wanted a driver with the function {missing}, found one without it. "
        "Install a newer driver",
    ]  # fmt: skip
    assert calls == []


def test_device_that_is_not_there(vendor: str, run: Any) -> None:
    said, _ = run("say(kvb.open(2))")
    place = CASES[vendor].place
    assert said == [3, f"DeviceError: {place}:2: wanted one of the 2 devices that this process sees"]


def test_tensors_elsewhere_and_foreign_code(vendor: str, run: Any) -> None:
    said, calls = run(
        """
        elsewhere = kvb.compress(operands((2 if PLACE[0] != 2 else 10, 0)))
        foreign = {name: data[:18] + bytes([190, 0]) + data[20:] for name, data in kvb.blobs.items()}
        say([elsewhere, kvb.open(blobs=foreign)])
        """
    )
    case = CASES[vendor]
    name = f"{vendor}:{case.arch}"
    assert said[0][0] == 2 and f"wanted a tensor on a device of {name}" in said[0][1]
    machine = binaries.MACHINES[vendor]
    assert said[1][0] == 2
    assert f"wanted ELF machine {machine}, which {name} runs; found machine 190" in said[1][1]
    assert calls == [], "the driver was not asked"


@pytest.mark.parametrize("host", zig.HOSTS)
def test_launchers_for_both_hosts(vendor: str, host: str) -> None:
    case = CASES[vendor]
    library = build_launcher(target_of(vendor, case.arch, case.triton)[0], host)
    assert int.from_bytes(library[18:20], "little") == (62 if host.startswith("x86_64") else 183)
    assert case.library.encode() + b"\0" in library
    for function in (case.launch, case.load, case.alloc):
        assert function is None or function.encode() + b"\0" in library


@pytest.mark.parametrize("triton", HIDDEN)
def test_hidden_pointers_follow_the_version_or_the_binary(vendor: str, triton: str) -> None:
    target, _ = target_of(vendor, CASES[vendor].arch, triton)
    assert {kernel["hidden"] for kernel in target["kernels"]} == {HIDDEN[triton]}
    derived = f"derived from Triton {triton}; the binaries do not tell them"
    told = None if vendor in ("hygon", "metax") else derived
    assert target["toolchain"].get("parameters") == told
    assert target["elf_machine"] == binaries.MACHINES[vendor]


def test_scratch_without_an_allocator_is_refused() -> None:
    target = json.loads(json.dumps(target_of("tianshu", "ivcore11", "3.1.0")[0]))
    target["variants"][0]["scratch_per_output"] = 6144
    with pytest.raises(BuildError, match="tianshu:ivcore11: variant of ratio 128, .* wanted no scratch"):
        generate.generate_table(target)


def test_a_block_too_large_is_refused() -> None:
    target = json.loads(json.dumps(target_of("mthreads", "mp_22", "3.2.0")[0]))
    target["kernels"][0]["num_warps"] = 16
    text = "num_warps: wanted at most 1024 threads a block, 128 a warp, found 16"
    with pytest.raises(BuildError, match=text):
        generate.generate_table(target)
