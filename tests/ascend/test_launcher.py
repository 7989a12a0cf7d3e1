"""What the Ascend launcher asks of ACL, against a stand-in that records it: no kernel runs here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
from recording import Recording, build_recording, launches, names, unpacked

from kvbuild.kernels.ascend import pipeline
from kvbuild.kernels.ascend.pipeline import Stage

CORES = 40
# client.operands: what each field holds in a call that nothing changes.
FIELDS = {
    "state_cache": 0x100000, "token_to_req": 0x200004, "positions": 0x300008,
    "boundary_token_indices": 0x400008, "block_table": 0x500004, "rms_norm_weight": 0x600010,
    "cos_sin_cache": 0x700010, "kv_slot_mapping": 0x800008, "kv_cache": 0x900010, "num_blocks": 5,
    "state_page_stride": 8208, "state_row_stride": 1024, "block_size": 8, "num_tokens": 7, "num_outputs": 3,
    "num_reqs": 2, "blocks_per_req": 6, "block_table_stride": 9, "max_pos": 11, "cos_sin_stride": 80,
    "kv_pages": 3, "kv_page_stride": 37456, "weight_is_fp32": 0, "rms_norm_eps": 1e-6,
}  # fmt: skip


def check_blocks(
    calls: list[dict[str, Any]], stages: tuple[Stage, ...], outputs: int, **changes: Any
) -> None:
    """Every launch of a call in one chunk: order, blocks, and every byte of the arguments."""
    memory = next(call["memory"] for call in calls if call["call"] == "aclrtMalloc")
    route = "index_select" if len(stages) == 6 else "block"
    offsets, _ = pipeline.scratch_layout(route, 128, outputs)
    fields = FIELDS | {"num_outputs": outputs} | changes
    done = launches(calls)
    assert len(done) == len(stages)
    for stage, launch in zip(stages, done, strict=True):
        if stage.kind == "aclnn":
            assert launch["call"] == "aclnnIndexSelect"
            assert (launch["rows"], launch["of"], launch["stream"]) == (outputs * 128, 40, 77)
            continue
        assert launch["name"] == "entry_" + stage.name.replace("-", "_")
        blocks = min(outputs * stage.per_output, CORES)
        assert (launch["blocks"], launch["stream"], launch["device"]) == (blocks, 77, 0)
        hidden, values, grid = unpacked(stage, bytes.fromhex(launch["arguments"]))
        assert hidden == (0xFF7500, 0, 0)
        assert grid == (blocks, 1, 1)
        for argument in stage.arguments:
            wanted = memory + offsets[argument.field] if argument.intermediate else fields[argument.field]
            assert values[argument.name] == pytest.approx(wanted, rel=1e-7), (stage.name, argument.name)


@pytest.mark.parametrize("outputs", [1, 3, 50])
def test_the_block_route_as_it_is_launched(acl: Any, outputs: int) -> None:
    said, calls = acl(f"kvb.open(); say([kvb.compress(call({outputs}), 77), kvb.counters()])")
    stages = pipeline.stages("block", 128, "aligned", 512)
    check_blocks(calls, stages, outputs)
    assert said[0] is None and said[1][:2] == [1, 0] and sum(said[1][2:]) == 1


def test_the_general_layout_as_it_is_launched(acl: Any) -> None:
    state = 'tensor((5, 8, 1024), "float32", 0x100004, (8208, 1024, 1), (NPU, 0))'
    said, calls = acl(f"kvb.open(); say([kvb.compress(call(state_cache={state}), 77), kvb.counters()])")
    check_blocks(calls, pipeline.stages("block", 128, "general", 512), 3, state_cache=0x100004)
    assert said[0] is None and said[1][:2] == [1, 1]


def test_index_select_as_it_is_launched(acl: Any) -> None:
    said, calls = acl("kvb.open(); say(kvb.compress(call(dense=True), 77))")
    stages = pipeline.stages("index_select", 128, "dense", 512)
    check_blocks(calls, stages, 3, state_page_stride=8192)
    assert said is None
    made = [call for call in calls if call["call"] == "aclCreateTensor"]
    assert [(call["rank"], call["rows"], call["dtype"]) for call in made] == [
        (2, 40, 0),
        (1, 384, 3),
        (2, 384, 0),
    ]
    assert names(calls, "aclDestroyTensor") == ["aclDestroyTensor"] * 3


def test_each_argument_lies_at_a_multiple_of_its_size(tmp_path: Path, session_folder: Path) -> None:
    # No stage has a value of 4 bytes before one of 8 today; what comes first here has.
    stage = next(each for each in pipeline.stages("block", 128, "aligned", 512) if each.name == "normalise")
    first = sorted(stage.arguments, key=lambda argument: argument.name != "weight_is_fp32")

    def change(target: dict[str, Any]) -> None:
        kernel = next(each for each in target["kernels"] if each["name"] == "normalise")
        kernel["args"].sort(key=lambda argument: argument["name"] != "weight_is_fp32")

    moved = build_recording(tmp_path / "moved", session_folder, change)
    said, calls = moved.run("kvb.open(); say(kvb.compress(call(), 77))", tmp_path)
    assert said is None
    block = bytes.fromhex(launches(calls)[1]["arguments"])
    _, values, grid = unpacked(replace(stage, arguments=tuple(first)), block)
    assert (values["weight_is_fp32"], values["num_outputs"], values["weight_bf16"]) == (0, 3, 0x600010)
    assert grid == (3, 1, 1)


LAYOUTS = {
    "dense": "call(dense=True)",
    "aligned: pages with gaps": "call()",
    "general: an address": 'call(rms_norm_weight=tensor((512,), "bfloat16", 0x600002, None, (NPU, 0)))',
    "dense: an fp32 weight": (
        'call(dense=True, rms_norm_weight=tensor((512,), "float32", 0x600010, None, (NPU, 0)))'
    ),
    "general: an fp32 weight": 'call(rms_norm_weight=tensor((512,), "float32", 0x600010, None, (NPU, 0)))',
    "general: rows with gaps": (
        'call(state_cache=tensor((5, 3, 1024), "float32", 0x100000, (3084, 1028, 1), (NPU, 0)), block_size=3)'
    ),
    "dense: one page": (
        'call(state_cache=tensor((1, 8, 1024), "float32", 0x100000, (9999, 1024, 1), (NPU, 0)))'
    ),
    "dense: one row a page": (
        'call(state_cache=tensor((9, 1, 1024), "float32", 0x100000, (1024, 7, 1), (NPU, 0)), block_size=1)'
    ),
    "general: no page": (
        'call(state_cache=tensor((0, 3, 1024), "float32", 0x100000, None, (NPU, 0)), block_size=3)'
    ),
    "general: too many rows": (
        'call(state_cache=tensor((2**28, 9, 1024), "float32", 0x100000, None, (NPU, 0)), block_size=9)'
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_route_by_what_a_call_brings(acl: Any, case: str) -> None:
    said, calls = acl(f"kvb.open(); say(kvb.compress({LAYOUTS[case]}))")
    assert said is None
    first = launches(calls)[0]["name"]
    wanted = {"dense": "entry_locate_c128", "aligned": "entry_blocks_c128_aligned_d512",
              "general": "entry_blocks_c128_general_d512"}  # fmt: skip
    assert first == wanted[case.partition(":")[0]]


@pytest.mark.parametrize("ratio", [128, 256, 512])
def test_ratios(acl: Any, ratio: int) -> None:
    said, calls = acl(f"kvb.open(); say(kvb.compress(call(dense=True, compress_ratio={ratio})))")
    assert said is None
    assert [call.get("name") for call in launches(calls)[:3]] == [
        f"entry_locate_c{ratio}", None, f"entry_scan_c{ratio}_d512"
    ]  # fmt: skip
    assert launches(calls)[1]["rows"] == 3 * ratio


@pytest.mark.parametrize(
    ("route", "layout", "dense"), [("block", "aligned", False), ("index_select", "dense", True)]
)
def test_chunks(acl: Any, recording: Recording, route: str, layout: str, dense: bool) -> None:
    variant = recording.bench.variant(route, 128, layout, small=True)
    chosen = recording.bench.variants[variant]
    chunk = pipeline.chunk_outputs(route, 128, chosen.chunk_bytes)
    outputs = 3 * chunk + 1
    said, calls = acl(f"kvb.open(); pin({variant}); say(kvb.compress(call({outputs}, dense={dense}), 5))")
    assert said is None
    stages = chosen.stages
    done = launches(calls)
    assert len(done) == 4 * len(stages)
    place = next(index for index, stage in enumerate(stages) if stage.source in ("locate.py", "blocks.py"))
    for part in range(4):
        _, values, _ = unpacked(stages[place], bytes.fromhex(done[part * len(stages) + place]["arguments"]))
        assert values["boundary_token_indices"] == 0x400008 + 8 * chunk * part
        assert values["num_outputs"] == (chunk if part < 3 else 1)
    # Within the bound, in one piece for all chunks, however much larger than needed it was rounded.
    (made,) = [call for call in calls if call["call"] == "aclrtMalloc" and call["bytes"] > 1 << 20] or [
        next(call for call in calls if call["call"] == "aclrtMalloc")
    ]
    _, needed = pipeline.scratch_layout(route, 128, chunk)
    assert needed <= chosen.chunk_bytes
    assert max(1 << 20, needed) <= made["bytes"] < max((1 << 20) + 1, 2 * needed)


def test_no_more_programs_than_the_driver_takes(acl: Any, recording: Recording) -> None:
    variant = recording.bench.variant("block", 128, "aligned", 64)
    scenario = f"kvb.open(); pin({variant}); say(kvb.compress(call(16_000)))"
    said, calls = acl(scenario, KVB_STANDIN_CORES="100000")
    assert said is None
    # 16,000 outputs of eight dimension groups each.
    assert [call["blocks"] for call in launches(calls)] == [65_535, 16_000, 16_000, 16_000]


def test_no_outputs_no_work(acl: Any) -> None:
    said, calls = acl("kvb.open(); say([kvb.compress(call(0)), kvb.counters()[:2]])")
    assert said == [None, [1, 0]]
    assert launches(calls) == [] and names(calls, "aclrtMalloc") == []


def test_binaries_are_loaded_as_vector_kernels_on_their_device(acl: Any, recording: Recording) -> None:
    said, calls = acl("say([kvb.open(1), kvb.compress(call(device=1)), kvb.close(1)])")
    assert said == [None, None, None]
    loaded = [call for call in calls if call["call"] == "aclrtBinaryLoadFromData"]
    assert len(loaded) == len(recording.blobs)
    assert {
        (call["options"], call["option"], call["value"], call["device"], call["size"]) for call in loaded
    } == {(1, 2, 0x41415246, 1, 64)}
    assert {
        call["device"] for call in calls if "device" in call and call["call"] != "aclrtSetCurrentContext"
    } == {1}
    assert len(names(calls, "aclrtBinaryUnLoad")) == len(loaded)


def test_a_thread_gets_its_own_context_back(acl: Any) -> None:
    said, calls = acl(
        """
        acl = ctypes.CDLL("libascendcl.so")
        kvb.open(1)
        acl.aclrtSetDevice(0)
        current = ctypes.c_int()
        said = [kvb.compress(call(device=1))]
        acl.aclrtGetDevice(ctypes.byref(current))
        import threading
        other = threading.Thread(target=lambda: said.append(kvb.compress(call(device=1))))
        other.start(); other.join()
        say(said + [current.value])
        """
    )
    assert said == [None, None, 0]
    assert {call["device"] for call in launches(calls)} == {1}


def test_acl_that_others_have_begun(acl: Any) -> None:
    said, calls = acl(
        'ctypes.CDLL("libascendcl.so").aclInit(None); say([kvb.open(), kvb.open(1), kvb.open(5)])'
    )
    assert said == [None, None, [3, "DeviceError: npu:5: wanted one of the 2 devices that this process sees"]]
    assert len(names(calls, "aclInit")) == 2


OPENING = (
    "aclInit", "aclrtGetDeviceCount", "aclrtSetDevice", "aclrtGetCurrentContext@2",
    "aclrtGetHardwareSyncAddr", "aclrtGetDeviceInfo", "aclrtBinaryLoadFromData", "aclrtBinaryGetFunction",
)  # fmt: skip


@pytest.mark.parametrize("function", OPENING)
def test_open_says_what_acl_said(acl: Any, function: str) -> None:
    name, _, nth = function.partition("@")
    said, calls = acl("say([kvb.open(), kvb.open()])", KVB_STANDIN_FAIL=f"{name}@{nth or 1}=507033")
    code, words = said[0]
    assert code == 3
    assert words.startswith(f"DeviceError: {name}")
    assert words.endswith(": error 507033: EZ9999: the stand-in was told to fail")
    assert said[1] is None
    made = names(calls, "aclrtBinaryLoadFromData", "aclrtBinaryUnLoad")
    loaded = made.index("aclrtBinaryUnLoad") if "aclrtBinaryUnLoad" in made else 0
    assert made.count("aclrtBinaryUnLoad") == loaded


CALLING = (
    "aclmdlRICaptureGetInfo", "aclrtMalloc", "aclrtCreateEventExWithFlag", "aclrtLaunchKernelWithHostArgs@1",
    "aclrtLaunchKernelWithHostArgs@4", "aclnnIndexSelectGetWorkspaceSize", "aclrtMalloc@2",
    "aclnnIndexSelect", "aclrtRecordEvent@1", "aclrtRecordEvent@2",
)  # fmt: skip


@pytest.mark.parametrize("function", CALLING)
def test_a_call_says_what_acl_said_and_the_next_one_works(acl: Any, function: str) -> None:
    name, _, nth = function.partition("@")
    said, calls = acl(
        """
        kvb.open()
        said = [kvb.compress(call(dense=True), 7), kvb.compress(call(dense=True), 7)]
        say(said + [kvb.counters()[:2], kvb.close()])
        """,
        KVB_STANDIN_FAIL=f"{name}@{nth or 1}=207001",
    )
    code, words = said[0]
    assert code == 3 and words.startswith(f"DeviceError: {name}")
    assert words.endswith("error 207001: EZ9999: the stand-in was told to fail")
    assert said[1:] == [None, [2, 0], None]
    made = [call["memory"] for call in calls if call["call"] == "aclrtMalloc" and "failed" not in call]
    freed = [call["memory"] for call in calls if call["call"] == "aclrtFree"]
    assert sorted(made) == sorted(freed)
    # The memory between the stages and index_select's own: what a call that failed had serves the next one.
    again = {"aclrtCreateEventExWithFlag": 1, "aclrtRecordEvent@1": 1, "aclrtRecordEvent@2": 2}
    assert len(made) == 2 + again.get(function, 0)
    assert len(names(calls, "aclCreateTensor")) == len(names(calls, "aclDestroyTensor"))
    events = names(calls, "aclrtCreateEventExWithFlag", "aclrtDestroyEvent")
    assert events.count("aclrtCreateEventExWithFlag") == events.count("aclrtDestroyEvent")
    # Where nothing says when work is done, it is waited for before its memory goes.
    assert ("aclrtSynchronizeStream" in names(calls, "aclrtSynchronizeStream")) == (
        name == "aclrtRecordEvent"
    )


def test_a_failure_names_the_stage(acl: Any) -> None:
    said, _ = acl(
        "kvb.open(); say(kvb.compress(call()))", KVB_STANDIN_FAIL="aclrtLaunchKernelWithHostArgs@2=507015"
    )
    assert said[1].startswith("DeviceError: aclrtLaunchKernelWithHostArgs (normalise): error 507015: ")


def test_an_acl_without_words(acl: Any) -> None:
    said, _ = acl("say(kvb.open())", KVB_STANDIN_FAIL="aclInit=100001", KVB_STANDIN_WORDLESS="1")
    assert said == [3, "DeviceError: aclInit: error 100001: ACL has no words for it"]


def test_no_cann(recording: Recording, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    said, _ = recording.run("say(kvb.open())", tmp_path, tmp_path / "empty")
    assert said[0] == 3
    assert "libascendcl.so: cannot open shared object file" in said[1]
    assert said[1].endswith(
        "Install CANN 8.5 or later on this host and source its set_env.sh, or choose a target that this host "
        "has a device for"
    )


@pytest.mark.parametrize(
    "function", ["aclrtBinaryLoadFromData", "aclrtGetHardwareSyncAddr", "aclnnIndexSelect"]
)
def test_an_older_cann(recording: Recording, tmp_path: Path, session_folder: Path, function: str) -> None:
    harness.build_shared("acl.c", tmp_path, "libascendcl.so", session_folder, "-Wno-unused-function",
                         f"-D{function}=no_{function}")  # fmt: skip
    (tmp_path / "libopapi.so").symlink_to("libascendcl.so")
    said, _ = recording.run("say(kvb.open())", tmp_path, tmp_path)
    assert said[0] == 3 and f"the function {function}" in said[1]


def test_no_operator_library(recording: Recording, tmp_path: Path) -> None:
    (tmp_path / "libascendcl.so").symlink_to(recording.bench.folder / "driver/libascendcl.so")
    said, _ = recording.run("say(kvb.open())", tmp_path, tmp_path)
    assert said[0] == 3
    assert said[1].startswith("DeviceError: libopapi.so, which holds CANN's operators: ")


def test_operators_in_a_library_of_their_field(recording: Recording, tmp_path: Path) -> None:
    for name in ("libascendcl.so", "libopapi_nn.so"):
        (tmp_path / name).symlink_to(recording.bench.folder / "driver/libascendcl.so")
    said, _ = recording.run("say([kvb.open(), kvb.compress(call(dense=True))])", tmp_path, tmp_path)
    assert said == [None, None]


def test_a_pinned_variant_that_a_call_is_not_for(acl: Any, recording: Recording) -> None:
    variant = recording.bench.variant("index_select", 128, "dense")
    said, calls = acl(f"kvb.open(); pin({variant}); say(kvb.compress(call()))")
    assert said == [
        2, f"compress: variant {variant} is pinned, which is for ratio 128 and the dense layout; found a "
        "call of ratio 128 and other operands. Pin another one, or -1",
    ]  # fmt: skip
    assert launches(calls) == []


def test_tensors_elsewhere(acl: Any) -> None:
    said, _ = acl("kvb.open(); say(kvb.compress(operands((CUDA, 0))))")
    assert said == [
        2, "state_cache: wanted a tensor on a device of ascend:910B2, found one on cuda:0. Move it there"
    ]  # fmt: skip


@pytest.mark.parametrize("machine", [62, 183, 190, 224])
def test_a_binary_of_another_vendor(acl: Any, machine: int) -> None:
    said, calls = acl(
        f"""
        blobs = {{name: data[:18] + bytes([{machine}, 0]) + data[20:] for name, data in kvb.blobs.items()}}
        say(kvb.open(blobs=blobs))
        """
    )
    assert said[0] == 2
    assert f"wanted the ELF machine of ascend:910B2, found machine {machine}, which is another" in said[1]
    assert calls == []


def test_a_stage_that_was_not_finished(acl: Any) -> None:
    said, _ = acl('say(kvb.open(blobs=dict(kvb.blobs, normalise=b"module attributes {hivm.module} {}")))')
    assert said[0] == 2
    assert said[1].startswith("blob normalise: wanted a 64-bit little-endian ELF image for ascend:910B2")


def test_the_stream_that_a_thread_was_told_of(acl: Any) -> None:
    said, calls = acl(
        """
        import threading

        class Any_(ctypes.Structure):
            _fields_ = (("type", ctypes.c_int32), ("pad", ctypes.c_uint32), ("value", ctypes.c_int64))

        def use_stream(*values):
            given = (Any_ * len(values))(*(Any_(1, 0, value) for value in values))
            function = getattr(kvb.library, "__tvm_ffi_use_stream")
            return function(None, given, len(values), ctypes.byref(Any_()))

        kvb.open(); kvb.open(1)
        said = [use_stream(0, 41), kvb.compress(call()), kvb.compress(call(), 5)]
        said += [kvb.compress(call(device=1))]
        other = threading.Thread(target=lambda: said.append(kvb.compress(call())))
        other.start(); other.join()
        say(said + [use_stream(0)])
        """
    )
    assert said == [0, None, None, None, None, -1]
    assert [launch["stream"] for launch in launches(calls)[::4]] == [41, 5, 0, 0]
