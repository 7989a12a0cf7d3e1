"""The CUDA launcher against a stand-in libcuda.so.1 that refuses: what it says, and what it leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import pytest

ALIGNED_CALL = "say([kvb.open(), kvb.compress(operands(num_outputs=3), stream=77)])"


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        ("cuInit", "cuInit"), ("cuDeviceGetCount", "cuDeviceGetCount"), ("cuDeviceGet", "cuDeviceGet"),
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain"), ("cuMemPoolCreate", "cuMemPoolCreate"),
        ("cuMemPoolSetAttribute", "cuMemPoolSetAttribute"), ("cuCtxPushCurrent", "cuCtxPushCurrent"),
        ("cuLibraryLoadData@2", "cuLibraryLoadData"), ("cuLibraryGetKernel@3", "cuLibraryGetKernel"),
        ("cuKernelSetAttribute", "cuKernelSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)"),
        ("cuKernelSetAttribute@2", "cuKernelSetAttribute(NON_PORTABLE_CLUSTER_SIZE_ALLOWED)"),
        ("cuKernelGetFunction", "cuKernelGetFunction"), ("cuFuncLoad", "cuFuncLoad"),
    ],
)  # fmt: skip
def test_open_says_what_the_driver_said_and_leaves_nothing(run: Any, function: str, shown: str) -> None:
    said, calls = run("say([kvb.open(), kvb.compress(operands())])", KVB_STANDIN_FAIL=f"{function}=2")
    assert said[0] == [3, f"DeviceError: {shown}: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"]
    assert said[1][1].startswith("DeviceError: compress: cuda:0 is not open")
    done = [call for call in calls if "failed" not in call]
    for made, undone in (
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease"), ("cuMemPoolCreate", "cuMemPoolDestroy"),
        ("cuLibraryLoadData", "cuLibraryUnload"), ("cuCtxPushCurrent", "cuCtxPopCurrent"),
    ):  # fmt: skip
        assert len(harness.names(done, made)) == len(harness.names(done, undone)), made


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("cuLaunchKernelEx", "num_outputs=5"), ("cuMemAllocFromPoolAsync", "compress_ratio=512"),
        ("cuMemFreeAsync", "compress_ratio=512"), ("cuCtxPushCurrent@2", "num_outputs=1"),
    ],
)  # fmt: skip
def test_compress_says_what_the_driver_said(run: Any, function: str, call: str) -> None:
    said, _ = run(f"kvb.open(); say(kvb.compress(operands({call})))", KVB_STANDIN_FAIL=f"{function}=2")
    assert said == [3, f"DeviceError: {function.split('@')[0]}: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"]


def test_error_code_without_a_name(run: Any) -> None:
    said, _ = run("kvb.open(); say(kvb.compress(operands()))", KVB_STANDIN_FAIL="cuLaunchKernel=999")
    assert said == [3, "DeviceError: cuLaunchKernel: unknown error (999): the driver has no words for it"]


def test_device_that_is_not_there(run: Any) -> None:
    said, _ = run("say([kvb.open(2), kvb.open(-1), kvb.open(64)])")
    assert said == [
        [3, "DeviceError: cuda:2: wanted one of the 2 devices that this process sees"],
        [2, "device_id: wanted 0 to 63, found -1"], [2, "device_id: wanted 0 to 63, found 64"],
    ]  # fmt: skip


def test_device_without_pools(run: Any) -> None:
    said, _ = run("say(kvb.open())", KVB_STANDIN_POOLS="0")
    assert said[0] == 3
    assert said[1].startswith("DeviceError: cuda:0: wanted a device with memory pools")


def test_driver_that_is_too_old(run: Any) -> None:
    said, _ = run("say(kvb.open())", KVB_STANDIN_VERSION="12040")
    assert said == [
        3, "DeviceError: libcuda.so.1: wanted a driver for CUDA 12.8 or later, which built the kernels of "
        "nvidia:sm_90; found 12.4. Install a newer driver",
    ]  # fmt: skip


def test_missing_library(bench: tuple[harness.Bench, Path], tmp_path: Path) -> None:
    said, _ = bench[0].run("say(kvb.open())", tmp_path)
    if said is None:
        pytest.skip("this machine has a real libcuda.so.1")
    assert said[0] == 3
    assert said[1].startswith("DeviceError: libcuda.so.1: libcuda.so.1: cannot open shared object file")
    assert said[1].endswith("choose a target that this host has a device for")


def test_missing_function(bench: tuple[harness.Bench, Path], tmp_path: Path, session_folder: Path) -> None:
    old = harness.build_standin("nvidia", tmp_path / "old", session_folder / "cache", "-DWITHOUT_LAUNCH_EX")
    said, _ = bench[0].run("say(kvb.open())", tmp_path, old)
    assert said == [
        3, "DeviceError: libcuda.so.1: wanted a driver with the function cuLaunchKernelEx, found one "
        "without it. Install a newer driver",
    ]  # fmt: skip


def test_blobs_are_checked_before_the_driver_sees_them(run: Any) -> None:
    said, calls = run(
        """
        first, *rest = sorted(kvb.blobs)
        foreign = bytearray(kvb.blobs[first]); foreign[18] = 0xE0
        cases = [{}] + [{**kvb.blobs, first: data} for data in (bytes(foreign), b"no ELF", b"")]
        say([first] + [kvb.open(blobs=blobs) for blobs in cases])
        """
    )
    first = said[0]
    assert said[1] == [
        2,
        f"blobs: wanted {first} among them, found it missing. Pass all of the target's blobs",
    ]
    assert said[2] == [
        2, f"blob {first}: wanted ELF machine 190, which nvidia:sm_90 runs; found machine 224. "
        "It was built for another vendor",
    ]  # fmt: skip
    assert [code for code, _ in said[1:]] == [2, 2, 2, 2]
    assert "64-bit little-endian ELF" in said[3][1] and "found 6 bytes" in said[3][1]
    assert calls == []


def test_manifest_of_another_build(run: Any) -> None:
    said, calls = run(
        """
        other = kvb.manifest.replace(b'"launch_table":"', b'"launch_table":"0', 1)
        say([kvb.open(manifest=other), kvb.open(manifest=b""), kvb.open(), kvb.open(manifest=other)])
        """
    )
    assert [answer if answer is None else answer[0] for answer in said] == [2, 2, None, 2]
    assert said[0][1].startswith("manifest: wanted one that holds launch table")
    assert said[0][1].endswith("Take launcher and manifest from the same bundle")
    assert len([call for call in calls if call["call"] == "cuInit"]) == 1


def test_forked_child_is_told(run: Any) -> None:
    said, calls = run(
        """
        def in_child(work):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.write(writer, json.dumps(work()).encode())
                os._exit(0)
            os.close(writer)
            os.waitpid(pid, 0)
            return json.loads(os.read(reader, 65536) or b"null")
        before = in_child(lambda: kvb.open())
        kvb.open()
        child = in_child(lambda: [kvb.compress(operands()), kvb.open(1), kvb.counters(), kvb.close()])
        say([before, child, kvb.compress(operands())])
        """
    )
    before, child, parent = said
    assert (before, parent) == (None, None)
    for answer, function in zip(child, ("compress", "open", "counters"), strict=False):
        assert answer[0] == 3
        assert answer[1].startswith(
            f"DeviceError: {function}: this process was forked from one that had opened a"
        )
    assert child[3] is None
    assert harness.names(calls, "cuLibraryUnload") == [], "the child leaves the parent's driver alone"


def test_errors_belong_to_their_thread(run: Any) -> None:
    said, _ = run(
        """
        import threading
        first = kvb.compress(operands())
        thread = threading.Thread(target=kvb.open, args=(-1,))
        thread.start(); thread.join()
        say([first[1], kvb.library.kvb_last_error().decode()])
        """
    )
    assert said[0] == said[1]
