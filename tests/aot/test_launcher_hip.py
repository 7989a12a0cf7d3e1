"""The HIP launcher against a stand-in libamdhip64.so."""

from __future__ import annotations

from typing import Any

import harness
import pytest

VENDOR = "amd"


def test_launch(run: Any) -> None:
    said, calls = run("say([kvb.open(), kvb.compress(operands((ROCM, 0)), 77), kvb.counters()])")
    assert said == [None, None, [1, 0, 1, 0, 0, 0, 0]]
    (launch,) = harness.launches(calls)
    assert (launch["name"], launch["grid"], launch["block"]) == ("entry_small", [3, 1, 1], [256, 1, 1])
    assert (launch["shared"], launch["stream"], launch["device"]) == (0, 77, 0)
    address, last, hidden = launch["arguments"][0], launch["arguments"][-2], launch["arguments"][-1]
    assert (address, last, hidden) == ("0000100000000000", "bd378635", "00" * 8)


def test_device_is_current_around_what_needs_it(run: Any) -> None:
    said, calls = run(
        """
        said = [kvb.open(1), kvb.compress(operands((ROCM, 1)))]
        driver = ctypes.CDLL("libamdhip64.so")
        current = ctypes.c_int()
        driver.hipGetDevice(ctypes.byref(current))
        say(said + [current.value, kvb.close(1)])
        """
    )
    assert said == [None, None, 0, None]
    assert harness.launches(calls)[0]["device"] == 1
    assert {call["device"] for call in calls if call["call"] == "hipModuleLoadData"} == {1}
    assert {call["device"] for call in calls if call["call"] == "hipModuleUnload"} == {1}


@pytest.mark.parametrize("nth", [1, 2])
def test_scratch_goes_back_where_a_launch_fails(run: Any, nth: int) -> None:
    said, calls = run(
        "kvb.open(); say(kvb.compress(operands((ROCM, 0), compress_ratio=512), 9))",
        KVB_STANDIN_FAIL=f"hipModuleLaunchKernel@{nth}=700",
    )
    assert said == [
        3, "DeviceError: hipModuleLaunchKernel: hipErrorIllegalAddress (700): "
        "an illegal memory access was encountered",
    ]  # fmt: skip
    assert calls[-1] == {"call": "hipFreeAsync", "address": 0x5C0000, "stream": 9}


def test_scratch_comes_from_a_pool_of_its_own(run: Any) -> None:
    said, calls = run(
        "kvb.open(1); say([kvb.compress(operands((ROCM, 1), compress_ratio=512), 9), kvb.close(1)])"
    )
    assert said == [None, None]
    pools = [call for call in calls if call["call"].startswith("hipM") and "Pool" in call["call"]]
    assert pools == [
        {"call": "hipMemPoolCreate", "kind": 1, "place": 1, "device": 1},
        {"call": "hipMemPoolSetAttribute", "pool": 0x71, "attribute": 4, "value": 2**64 - 1},
        {"call": "hipMallocFromPoolAsync", "bytes": 3 * 2048, "pool": 0x71, "stream": 9},
        {"call": "hipMemPoolDestroy", "pool": 0x71},
    ]


@pytest.mark.parametrize(
    "function", ["hipInit", "hipGetDeviceCount", "hipMemPoolCreate", "hipGetDevice", "hipSetDevice",
                 "hipModuleLoadData", "hipModuleGetFunction"]
)  # fmt: skip
def test_open_says_what_the_driver_said(run: Any, function: str) -> None:
    said, calls = run("say(kvb.open(1))", KVB_STANDIN_FAIL=f"{function}@1=2")
    assert said == [3, f"DeviceError: {function}: hipErrorOutOfMemory (2): out of memory"]
    for made, undone in (("hipMemPoolCreate", "hipMemPoolDestroy"), ("hipModuleLoadData", "hipModuleUnload")):
        done = [call["call"] for call in calls if "failed" not in call]
        assert done.count(made) == done.count(undone)


def test_threads_are_counted_in_32_bits(run: Any) -> None:
    said, _ = run("kvb.open(); say(kvb.compress(operands((ROCM, 0), num_outputs=2**26)))")
    assert said[0] == 2
    assert "wanted at most 33554431 outputs, which is what one launch of large can hold" in said[1]


def test_tensors_of_another_vendor(run: Any) -> None:
    said, _ = run("kvb.open(); say(kvb.compress(operands((CUDA, 0))))")
    assert said == [
        2, "state_cache: wanted a tensor on a device of amd:gfx942, found one on cuda:0. Move it there"
    ]  # fmt: skip


def test_blob_of_another_vendor(run: Any) -> None:
    said, _ = run(
        """
        blobs = {name: data[:18] + bytes([190, 0]) + data[20:] for name, data in kvb.blobs.items()}
        say(kvb.open(blobs=blobs))
        """
    )
    assert said[0] == 2 and "wanted ELF machine 224, which amd:gfx942 runs; found machine 190" in said[1]
