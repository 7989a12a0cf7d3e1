"""The CUDA launcher against a stand-in libcuda.so.1: what it loads, what it launches, what it says."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "standin"))
import harness

ALIGNED_CALL = "say([kvb.open(), kvb.compress(operands(num_outputs=3), stream=77)])"
SPREAD = [5, 1, 0, 0]


@pytest.fixture
def bench(session_folder: Path) -> tuple[harness.Bench, Path]:
    return harness.gpu_bench("nvidia", session_folder)


@pytest.fixture
def run(bench: tuple[harness.Bench, Path], tmp_path: Path) -> Any:
    def scenario(text: str, **settings: str) -> tuple[Any, list[dict[str, Any]]]:
        return bench[0].run(text, tmp_path, bench[1], **settings)

    return scenario


def launches(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [call for call in calls if call["call"] == "launch"]


def names(calls: list[dict[str, Any]], *wanted: str) -> list[str]:
    return [call["call"] for call in calls if call["call"] in wanted]


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
    (launch,) = launches(calls)
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
    assert launches(calls)[0]["arguments"][-2:] == ["00" * 8, "00" * 8]


def test_byte_offset_is_folded_into_the_address(run: Any, bench: tuple[harness.Bench, Path]) -> None:
    _, calls = run(
        """
        kvb.open()
        state = tensor((5, 8, 1024), "float32", 0x100000, (8208, 1024, 1), byte_offset=64)
        say(kvb.compress(operands(state_cache=state)))
        """
    )
    assert unpack(launches(calls)[0], bench)["state_cache"] == 0x100040


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
    values = unpack(launches(calls)[0], bench)
    assert launches(calls)[0]["name"] == "entry_small"
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
    assert [launch["name"] for launch in launches(calls)] == launched
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
    assert [launch["name"] for launch in launches(calls)] == ["entry_general"]


def test_weight_of_float32_is_passed_on(run: Any, bench: tuple[harness.Bench, Path]) -> None:
    _, calls = run(
        'kvb.open(); say(kvb.compress(operands(rms_norm_weight=tensor((512,), "float32", 0x600010))))'
    )
    assert unpack(launches(calls)[0], bench)["weight_is_fp32"] == 1


def test_cluster_launch(run: Any) -> None:
    _, calls = run("kvb.open(); say(kvb.compress(operands(num_outputs=5), stream=9))")
    (launch,) = launches(calls)
    assert (launch["grid"], launch["block"], launch["shared"]) == ([80, 1, 1], [64, 1, 1], 100_000)
    assert launch["attributes"] == [[4, 16, 1, 1], SPREAD]
    asked = [call for call in calls if call["call"] == "cuKernelSetAttribute"]
    assert [(call["name"], call["attribute"], call["value"]) for call in asked] == [
        ("entry_large", 8, 100_000), ("entry_large", 14, 1)
    ]  # fmt: skip


def test_grid_of_two_launches_and_their_scratch(run: Any, bench: tuple[harness.Bench, Path]) -> None:
    _, calls = run("kvb.open(); say(kvb.compress(operands(num_outputs=2, compress_ratio=512), stream=9))")
    order = names(calls, "cuMemAllocFromPoolAsync", "launch", "cuMemFreeAsync")
    assert order == ["cuMemAllocFromPoolAsync", "launch", "launch", "cuMemFreeAsync"]
    scan, finish = launches(calls)
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
    assert names(calls, "cuMemFreeAsync", "cuCtxPopCurrent")[-2:] == ["cuMemFreeAsync", "cuCtxPopCurrent"]


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
    after = calls[calls.index(launches(calls)[0]) :]
    assert (
        names(after, "cuKernelGetFunction", "cuFuncLoad", "cuLibraryLoadData", "cuKernelSetAttribute") == []
    )
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
    at = calls.index(launches(calls)[0])
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
    assert launches(calls)[0]["context"] == 0xC1


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
    assert [(launch["context"], launch["stream"]) for launch in launches(calls)] == [
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
    assert [launch["grid"] for launch in launches(calls)] == [[2**31 - 16, 1, 1]]


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
        assert len(names(done, made)) == len(names(done, undone)), made


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
    assert names(calls, "cuLibraryUnload") == [], "the child leaves the parent's driver alone"


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
    assert names(calls, "launch", "cuLibraryUnload") == ["launch", *["cuLibraryUnload"] * 3]


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
