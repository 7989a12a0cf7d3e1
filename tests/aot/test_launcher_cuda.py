"""The CUDA launcher against a stand-in libcuda.so.1: what it loads and what it launches."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import harness
import pytest

ALIGNED_CALL = "say([kvb.open(), kvb.compress(operands(num_outputs=3), stream=77)])"
SPREAD = [5, 1, 0, 0]


def unpack(call: dict[str, Any], bench: tuple[harness.Bench, Path]) -> dict[str, Any]:
    formats = {"i64": "<q", "i32": "<i", "fp32": "<f"}
    args = bench[0].target["kernels"][0]["args"]
    return {
        arg["field"]: struct.unpack(formats.get(arg["type"], "<Q"), bytes.fromhex(data))[0]
        for arg, data in zip(args, call["arguments"], strict=False)
    }


def test_every_argument_by_its_bytes(run: Any, bench: tuple[harness.Bench, Path]) -> None:
    said, calls = run(ALIGNED_CALL)
    assert said == [None, None]
    (launch,) = harness.launches(calls)
    assert unpack(launch, bench) == {
        "state_cache": 0x100000, "token_to_req": 0x200004, "positions": 0x300008,
        "boundary_token_indices": 0x400008, "block_table": 0x500004, "rms_norm_weight": 0x600010,
        "cos_sin_cache": 0x700010, "kv_slot_mapping": 0x800008, "kv_cache": 0x900010, "scratch": 0,
        "num_blocks": 5, "state_page_stride": 8208, "state_row_stride": 1024, "block_size": 8,
        "num_tokens": 7, "num_outputs": 3, "num_reqs": 2,
        "blocks_per_req": 6, "block_table_stride": 9, "max_pos": 11, "cos_sin_stride": 80,
        "kv_pages": 3, "kv_page_stride": 37456, "weight_is_fp32": 0,
        "rms_norm_eps": struct.unpack("<f", struct.pack("<f", 1e-6))[0],
    }  # fmt: skip
    assert launch["arguments"][-1] == "00" * 8, "hidden pointers are NULL"
    assert (launch["name"], launch["grid"], launch["block"]) == ("entry_small", [3, 1, 1], [128, 1, 1])
    assert (launch["shared"], launch["stream"], launch["context"]) == (0, 77, 0xC0)
    assert launch["attributes"] == []


def test_both_hidden_pointers_are_null(run: Any, bench: tuple[harness.Bench, Path]) -> None:
    sizes = [str(arg["size"]) for arg in bench[0].target["kernels"][0]["args"]]
    _, calls = run(ALIGNED_CALL, KVB_STANDIN_ARGS=",".join([*sizes, "8", "8"]))
    assert harness.launches(calls)[0]["arguments"][-2:] == ["00" * 8, "00" * 8]


def test_byte_offset_is_folded_into_the_address(run: Any, bench: tuple[harness.Bench, Path]) -> None:
    _, calls = run(
        """
        kvb.open()
        state = tensor((5, 8, 1024), "float32", 0x100000, (8208, 1024, 1), byte_offset=64)
        say(kvb.compress(operands(state_cache=state)))
        """
    )
    assert unpack(harness.launches(calls)[0], bench)["state_cache"] == 0x100040


def test_strides_of_extents_of_one_say_nothing(run: Any, bench: tuple[harness.Bench, Path]) -> None:
    said, calls = run(
        """
        kvb.open()
        say(kvb.compress(operands(
            kv_cache=tensor((1, 37440), "uint8", 0x900010, (37441, 1)),
            block_table=tensor((2, 1), "int32", 0x500004, (3, 7)),
            cos_sin_cache=tensor((1, 64), "float32", 0x700010, (-5, 1)))))
        """
    )
    assert said is None
    values = unpack(harness.launches(calls)[0], bench)
    assert harness.launches(calls)[0]["name"] == "entry_small"
    assert (values["kv_page_stride"], values["block_table_stride"], values["cos_sin_stride"]) == (0, 3, 0)


@pytest.mark.parametrize(
    ("call", "launched"),
    [
        ("num_outputs=1", ["entry_small"]),
        ("num_outputs=4", ["entry_small"]),
        ("num_outputs=5", ["entry_large"]),
        ("num_outputs=100000", ["entry_large"]),
        ("num_outputs=8, compress_ratio=512", ["entry_scan", "entry_finish"]),
        ("num_outputs=9, compress_ratio=512", ["entry_general512"]),
        ("num_outputs=0", []),
    ],
)
def test_variant_by_ratio_and_outputs(run: Any, call: str, launched: list[str]) -> None:
    said, calls = run(f"kvb.open(); say([kvb.compress(operands({call})), kvb.counters()])")
    assert said[0] is None
    assert [launch["name"] for launch in harness.launches(calls)] == launched
    assert said[1][0] == 1
    assert sum(said[1][2:]) == (1 if launched else 0)


@pytest.mark.parametrize(
    "change",
    [
        'state_cache=tensor((5, 8, 1024), "float32", 0x100004, (8208, 1024, 1))',
        'state_cache=tensor((5, 8, 1024), "float32", 0x100000, (8200, 1024, 1))',
        'state_cache=tensor((5, 8, 1024), "float32", 0x100000, (8224, 1028, 1))',
        'state_cache=tensor((5, 4, 1024), "float32", 0x100000, (8208, 1024, 1)), block_size=4',
        'state_cache=tensor((5, 16, 1024), "float32"), block_size=16',
        'rms_norm_weight=tensor((512,), "float32", 0x600010)',
        'rms_norm_weight=tensor((512,), "bfloat16", 0x600002)',
        'cos_sin_cache=tensor((11, 64), "float32", 0x700014)',
        'cos_sin_cache=tensor((11, 64), "float32", 0x700010, (68, 1))',
        'kv_cache=tensor((3, 37440), "uint8", 0x900002)',
        'kv_cache=tensor((3, 37440), "uint8", 0x900010, (37442, 1))',
    ],
)
def test_general_where_an_assumption_does_not_hold(run: Any, change: str) -> None:
    said, calls = run(f"kvb.open(); say([kvb.compress(operands({change})), kvb.counters()])")
    assert said == [None, [1, 1, 0, 0, 1, 0, 0]]
    assert [launch["name"] for launch in harness.launches(calls)] == ["entry_general"]


def test_weight_of_float32_is_passed_on(run: Any, bench: tuple[harness.Bench, Path]) -> None:
    _, calls = run(
        'kvb.open(); say(kvb.compress(operands(rms_norm_weight=tensor((512,), "float32", 0x600010))))'
    )
    assert unpack(harness.launches(calls)[0], bench)["weight_is_fp32"] == 1


def test_cluster_launch(run: Any) -> None:
    _, calls = run("kvb.open(); say(kvb.compress(operands(num_outputs=5), stream=9))")
    (launch,) = harness.launches(calls)
    assert (launch["grid"], launch["block"], launch["shared"]) == ([80, 1, 1], [64, 1, 1], 100_000)
    assert launch["attributes"] == [[4, 16, 1, 1], SPREAD]
    asked = [call for call in calls if call["call"] == "cuKernelSetAttribute"]
    assert [(call["name"], call["attribute"], call["value"]) for call in asked] == [
        ("entry_large", 8, 100_000), ("entry_large", 14, 1)
    ]  # fmt: skip


def test_grid_of_two_launches_and_their_scratch(run: Any, bench: tuple[harness.Bench, Path]) -> None:
    _, calls = run("kvb.open(); say(kvb.compress(operands(num_outputs=2, compress_ratio=512), stream=9))")
    order = harness.names(calls, "cuMemAllocFromPoolAsync", "launch", "cuMemFreeAsync")
    assert order == ["cuMemAllocFromPoolAsync", "launch", "launch", "cuMemFreeAsync"]
    scan, finish = harness.launches(calls)
    assert (scan["grid"], scan["block"], finish["grid"]) == ([16, 3, 1], [32, 1, 1], [2, 1, 1])
    assert [unpack(launch, bench)["scratch"] for launch in (scan, finish)] == [0x5C0000] * 2
    (taken,) = [call for call in calls if call["call"] == "cuMemAllocFromPoolAsync"]
    assert (taken["bytes"], taken["pool"], taken["stream"]) == (4096, 0x70, 9)
    (given,) = [call for call in calls if call["call"] == "cuMemFreeAsync"]
    assert (given["address"], given["stream"]) == (0x5C0000, 9)


@pytest.mark.parametrize("nth", [1, 2])
def test_scratch_goes_back_where_a_launch_fails(run: Any, nth: int) -> None:
    said, calls = run(
        "kvb.open(); say([kvb.compress(operands(compress_ratio=512)), kvb.counters()])",
        KVB_STANDIN_FAIL=f"cuLaunchKernel@{nth}=700 cuMemFreeAsync=2",
    )
    assert said[0] == [
        3, "DeviceError: cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS (700): "
        "an illegal memory access was encountered",
    ]  # fmt: skip
    assert said[1][2:] == [0, 0, 0, 0, 0]
    last = ["cuMemFreeAsync", "cuCtxPopCurrent"]
    assert harness.names(calls, *last)[-2:] == last


def test_own_pool_that_keeps_its_memory(run: Any) -> None:
    _, calls = run("kvb.open(1); say(kvb.close(1))")
    made = [call for call in calls if call["call"].startswith("cuMemPool")]
    assert made == [
        {"call": "cuMemPoolCreate", "kind": 1, "handles": 0, "place": 1, "device": 1},
        {"call": "cuMemPoolSetAttribute", "pool": 0x71, "attribute": 4, "value": 2**64 - 1},
        {"call": "cuMemPoolDestroy", "pool": 0x71},
    ]


def test_everything_is_loaded_in_open(run: Any, bench: tuple[harness.Bench, Path]) -> None:
    _, calls = run("kvb.open(); say(kvb.compress(operands()))")
    resolved = [call for call in calls if call["call"] in ("cuKernelGetFunction", "cuFuncLoad")]
    wanted = [kernel["entry"] for kernel in bench[0].target["kernels"]]
    assert [call["name"] for call in resolved if call["call"] == "cuFuncLoad"] == wanted
    assert [call["name"] for call in resolved if call["call"] == "cuKernelGetFunction"] == wanted
    assert {call["context"] for call in resolved} == {0xC0}
    after = calls[calls.index(harness.launches(calls)[0]) :]
    loading = ("cuKernelGetFunction", "cuFuncLoad", "cuLibraryLoadData", "cuKernelSetAttribute")
    assert harness.names(after, *loading) == []
    assert len([call for call in calls if call["call"] == "cuLibraryLoadData"]) == 3, "each blob once"


@pytest.mark.parametrize("stream", [0, 77])
def test_context_is_made_current_around_a_call(run: Any, stream: int) -> None:
    said, calls = run(
        f"""
        import threading
        kvb.open()
        answers = []
        thread = threading.Thread(target=lambda: answers.append(kvb.compress(operands(), {stream})))
        thread.start(); thread.join()
        say(answers)
        """
    )
    assert said == [None]
    at = calls.index(harness.launches(calls)[0])
    around = [(call["call"], call["context"]) for call in calls[at - 1 : at + 2]]
    assert around == [("cuCtxPushCurrent", 0xC0), ("launch", 0xC0), ("cuCtxPopCurrent", 0xC0)]


def test_context_that_is_current_stays(run: Any) -> None:
    _, calls = run(
        """
        driver = ctypes.CDLL("libcuda.so.1")
        kvb.open()
        driver.cuCtxPushCurrent_v2(ctypes.c_void_p(0xC0))
        say(kvb.compress(operands()))
        """
    )
    assert calls[-1]["call"] == "launch"
    assert calls[-2]["call"] == "cuCtxPushCurrent", "the caller's own"


def test_context_of_another_device_is_put_aside(run: Any) -> None:
    said, calls = run(
        """
        driver = ctypes.CDLL("libcuda.so.1")
        kvb.open(1)
        driver.cuCtxPushCurrent_v2(ctypes.c_void_p(0xC0))
        kvb.compress(operands((CUDA, 1)))
        current = ctypes.c_void_p()
        driver.cuCtxGetCurrent(ctypes.byref(current))
        say(current.value)
        """
    )
    assert said == 0xC0
    assert harness.launches(calls)[0]["context"] == 0xC1


def test_context_is_put_back_where_a_launch_fails(run: Any) -> None:
    _, calls = run("kvb.open(); say(kvb.compress(operands()))", KVB_STANDIN_FAIL="cuLaunchKernel=700")
    assert [call["call"] for call in calls[-3:]] == ["cuCtxPushCurrent", "cuLaunchKernel", "cuCtxPopCurrent"]


def test_two_devices(run: Any) -> None:
    said, calls = run(
        """
        said = [kvb.open(0), kvb.open(1)]
        said += [kvb.compress(operands((CUDA, 0)), 5), kvb.compress(operands((CUDA, 1), num_outputs=5), 6)]
        said += [kvb.counters(0), kvb.counters(1), kvb.close(1)]
        say(said + [kvb.compress(operands((CUDA, 0))), kvb.close(0)])
        """
    )
    assert said == [None] * 4 + [[1, 0, 1, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0, 0]] + [None] * 3
    assert [(launch["context"], launch["stream"]) for launch in harness.launches(calls)] == [
        (0xC0, 5),
        (0xC1, 6),
        (0xC0, 0),
    ]
    attributes = [call["device"] for call in calls if call["call"] == "cuKernelSetAttribute"]
    assert attributes == [0, 0, 1, 1]


def test_open_and_close_are_counted(run: Any) -> None:
    said, calls = run(
        """
        said = [kvb.compress(operands()), kvb.close()]
        said += [kvb.open(), kvb.open(), kvb.close(), kvb.compress(operands()), kvb.close()]
        said += [kvb.compress(operands()), kvb.close(), kvb.counters()]
        say(said + [kvb.open(), kvb.compress(operands())])
        """
    )
    advice = "is not open in this launcher. Call open for it first"
    refused = [[3, f"DeviceError: {name}: cuda:0 {advice}"] for name in ("compress", "close", "counters")]
    assert said == [refused[0], refused[1], None, None, None, None, None, *refused, None, None]
    assert len([call for call in calls if call["call"] == "cuDevicePrimaryCtxRetain"]) == 2
    assert len([call for call in calls if call["call"] == "cuDevicePrimaryCtxRelease"]) == 1
    loaded = {call["library"] for call in calls if call["call"] == "cuLibraryLoadData"}
    unloaded = {call["library"] for call in calls if call["call"] == "cuLibraryUnload"}
    assert len(loaded) == 6 and len(unloaded) == 3 and unloaded < loaded


def test_outputs_beyond_one_launch(run: Any) -> None:
    said, calls = run(
        """
        kvb.open()
        say([kvb.compress(operands(num_outputs=2**27)), kvb.compress(operands(num_outputs=2**27 - 1)),
             kvb.compress(operands(num_outputs=2**31, rms_norm_weight=tensor((512,), "float32", 0x600010)))])
        """
    )
    text = (
        "boundary_token_indices: wanted at most {}, which is what one launch of {} can hold; found {}. "
        "Split the call"
    )
    assert said == [
        [2, text.format("134217727 outputs", "large", 2**27)], None,
        [2, text.format("2147483647 outputs", "general", 2**31)],
    ]  # fmt: skip
    assert [launch["grid"] for launch in harness.launches(calls)] == [[2**31 - 16, 1, 1]]


def test_threads_while_another_opens_and_closes(run: Any) -> None:
    said, _ = run(
        """
        import threading
        kvb.open()
        answers = []
        def work():
            answers.extend(kvb.compress(operands()) for _ in range(200))
        def churn():
            for _ in range(50):
                kvb.open(); kvb.open(1); kvb.close(1); kvb.close()
        threads = [threading.Thread(target=work) for _ in range(4)] + [threading.Thread(target=churn)]
        [thread.start() for thread in threads]; [thread.join() for thread in threads]
        say([len(answers), [answer for answer in answers if answer], kvb.counters()[0], kvb.close()])
        """,
        KVB_STANDIN_LOG="/dev/null",
    )
    assert said == [800, [], 800, None]


def test_close_waits_for_a_call_in_flight(run: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    said, calls = run(
        """
        import threading, time
        kvb.open()
        answers = []
        call = threading.Thread(target=lambda: answers.append(kvb.compress(operands())))
        call.start()
        while "waits" not in open(os.environ["KVB_STANDIN_LOG"]).read():
            time.sleep(0.001)
        close = threading.Thread(target=lambda: answers.append(kvb.close()))
        close.start()
        close.join(0.2)
        waits = close.is_alive()
        open(os.environ["KVB_STANDIN_GATE"], "w").close()
        call.join(); close.join()
        say([waits, answers])
        """,
        KVB_STANDIN_GATE=str(gate),
    )
    assert said == [True, [None, None]]
    assert harness.names(calls, "launch", "cuLibraryUnload") == ["launch", *["cuLibraryUnload"] * 3]
