"""Bound calls: the same launches as whole calls, what a binding refuses, and what it holds on to."""

from __future__ import annotations

import ctypes
import os
import struct
import weakref
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest

CALLS = (
    "num_outputs=1", "num_outputs=4", "num_outputs=5", "num_outputs=0", "num_outputs=8, compress_ratio=512",
    "num_outputs=9, compress_ratio=512",
    'state_cache=tensor((5, 16, 1024), "float32"), block_size=16',
    'state_cache=tensor((5, 8, 1024), "float32", 0x100000, (8208, 1024, 1), byte_offset=64)',
    'rms_norm_weight=tensor((512,), "float32", 0x600010), rms_norm_eps=0.5',
    'kv_cache=tensor((1, 37440), "uint8", 0x900010, (37441, 1)), block_table=tensor((2, 1), "int32", 0x504)',
    'token_to_req=tensor((0,), "int32", 0), positions=tensor((0,), "int64", 0), '
    'kv_slot_mapping=tensor((0,), "int64", 0)',
)  # fmt: skip

WATCHED = """
kvb.open()
call, seen, said = operands(), [], []
now = {index: call[name] for index, name in enumerate(FIXED)}
def look(owner, out):
    seen.append(owner)
    found = now[owner - 100]
    if found is None:
        return -1
    out[0] = found
    return 0
def pause():
    seen.append("pause")
    return 7
hooks = (LOOK(look), FAILED(lambda: seen.append("failed")), PAUSE(pause), RESUME(seen.append))
watch = Watch(hooks[0], (ctypes.c_void_p * 5)(100, 101, 102, 103, 104), *hooks[1:])
step = kvb.bind(call, watch)
watch.look = LOOK()
"""


def test_a_step_launches_what_a_whole_call_launches(run: Any) -> None:
    """Variant, grid, stream, context, scratch and every argument's bytes; and it counts alike."""
    scenario = f"""
    kvb.open()
    calls = [{", ".join(f"operands({call})" for call in CALLS)}]
    said = [kvb.compress(call, 77) for call in calls] + [kvb.counters()]
    bound = [kvb.bind(call) for call in calls]
    said += [kvb.step(step, call, 77) for step, call in zip(bound, calls)] + [kvb.counters()]
    for step in bound:
        kvb.unbind(step)
    say(said)
    """
    said, calls = run(scenario)
    count = len(CALLS)
    whole, bound = said[count], said[-1]
    assert said[:count] + said[count + 1 : -1] == [None] * (2 * count)
    assert bound == [2 * value for value in whole] and whole[0] == count
    work = [call for call in calls if call["call"] in ("launch", "cuMemAllocFromPoolAsync", "cuMemFreeAsync")]
    half = len(work) // 2
    launched = harness.launches(work)
    assert len(launched) == 2 * (count - 1 + 1), "one call launches nothing, one launches two kernels"
    assert work[:half] == work[half:]
    assert {call["stream"] for call in work} == {77}
    assert {call["context"] for call in launched} == {0xC0}


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ("state_cache=None", 1, "state_cache: wanted a tensor, found NULL"),
        ("block_table=None", 1, "block_table: wanted a tensor, found NULL"),
        ('state_cache=tensor((5, 8, 1024), "float64")', 1, "state_cache: wanted dtype float32, found f"),
        ('block_table=tensor((12,), "int32")', 2, "block_table: wanted 2 dimensions, found 1"),
        ('rms_norm_weight=tensor((511,), "bfloat16")', 2, "rms_norm_weight: wanted shape[0] = 512, found"),
        ('cos_sin_cache=tensor((11, 64), "float32", 0)', 2, "cos_sin_cache: wanted memory behind"),
        ('kv_cache=tensor((3, 37440), "uint8", 0x900001)', 2, "kv_cache: wanted an even base address"),
        ('kv_cache=tensor((3, 37440), "uint8", device=(CUDA, 1))', 2, "kv_cache: wanted a tensor on cuda:0"),
        ('state_cache=tensor((5, 8, 1024), "float32", device=(CPU, 0))', 2, "state_cache: wanted a"),
        ("block_size=4", 2, "block_size: wanted 8, which is state_cache's shape[1]; found 4"),
        ("compress_ratio=64", 2, "compress_ratio: wanted one that was compiled (128, 512), found 64"),
        ("rms_norm_eps=-1", 2, "rms_norm_eps: wanted a finite float32 of 0 or more, found -1"),
    ],
)  # fmt: skip
def test_bind_refuses_what_a_call_refuses(run: Any, change: str, code: int, text: str) -> None:
    said, calls = run(f"kvb.open(); say([kvb.bind(operands({change})), kvb.compress(operands({change}))])")
    assert said[0][0] == code and said[0][1].startswith(text)
    assert said[0] == said[1]
    assert harness.launches(calls) == []


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ("token_to_req=None", 1, "token_to_req: wanted a tensor, found NULL"),
        ('positions=tensor((7,), "int32")', 1, "positions: wanted dtype int64, found int32"),
        ('positions=tensor((8,), "int64")', 2, "positions: wanted shape[0] = 7 (num_tokens"),
        ('boundary_token_indices=tensor((3,), "int64", strides=(2,))', 2, "boundary_token_indices: wanted"),
        ('kv_slot_mapping=tensor((7,), "int64", device=(CUDA, 1))', 2, "kv_slot_mapping: wanted a tensor on"),
        ('kv_slot_mapping=tensor((7,), "int64", 0x800004)', 2, "kv_slot_mapping: wanted an address"),
        ('boundary_token_indices=tensor((2**31,), "int64", 0x400008)', 2, "boundary_token_indices: wanted a"),
    ],
)  # fmt: skip
def test_a_step_refuses_what_a_call_refuses(run: Any, change: str, code: int, text: str) -> None:
    said, calls = run(
        f"""
        kvb.open()
        step = kvb.bind(operands())
        say([kvb.step(step, operands({change})), kvb.compress(operands({change}))])
        """
    )
    assert said[0][0] == code and said[0][1].startswith(text)
    assert said[0] == said[1]
    assert harness.launches(calls) == []


def test_a_binding_is_wanted(run: Any) -> None:
    said, _ = run("kvb.open(); kvb.unbind(None); say(kvb.step(None, operands()))")
    assert said == [1, "binding: wanted one that kvb_bind made, found NULL"]


def test_a_step_looks_at_every_fixed_tensor_before_it_launches(run: Any) -> None:
    said, calls = run(WATCHED + "say([kvb.step(step, call), seen])")
    assert said == [None, [100, 101, 102, 103, 104, "pause", 7]]
    assert len(harness.launches(calls)) == 1


@pytest.mark.parametrize(
    ("index", "changed", "found"),
    [
        (0, 'tensor((5, 8, 1024), "float32", 0x200000, (8208, 1024, 1))', "state_cache|other memory"),
        (0, 'tensor((5, 8, 1024), "float32", 0x100000, (8208, 1024, 1), byte_offset=4)',
            "state_cache|other memory"),
        (0, 'tensor((4, 8, 1024), "float32", 0x100000, (8208, 1024, 1))', "state_cache|another shape"),
        (0, 'tensor((5, 8, 1024), "float32", 0x100000, (8192, 1024, 1))', "state_cache|other strides"),
        (0, 'tensor((5, 8, 1024), "float32", 0x100000)', "state_cache|other strides"),
        (1, 'tensor((2, 6), "int32", 0)', "block_table|other memory"),
        (1, 'tensor((12,), "int32", 0x500004)', "block_table|another number of dimensions"),
        (2, 'tensor((512,), "float16", 0x600010)', "rms_norm_weight|another dtype"),
        (3, 'tensor((12, 64), "float32", 0x700010, (80, 1))', "cos_sin_cache|another shape"),
        (4, 'tensor((3, 37440), "uint8", 0x900010, (37456, 1), (CUDA, 1))', "kv_cache|another device"),
        (4, "None", "kv_cache|one that can no longer be looked at"),
    ],
)  # fmt: skip
def test_a_changed_tensor_is_refused_by_name(run: Any, index: int, changed: str, found: str) -> None:
    said, calls = run(
        WATCHED + f"kept = now[{index}]; now[{index}] = {changed}; said.append(kvb.step(step, call)); "
        f"now[{index}] = kept; last = seen[-1]; say([*said, last, kvb.step(step, call), kvb.counters()[0]])"
    )
    name, words = found.split("|")
    assert said[0] == [
        2, f"{name}: wanted the tensor as it was bound, found {words}. Bind again after resizing or "
        "replacing a bound tensor's memory",
    ]  # fmt: skip
    assert said[1] == ("failed" if changed == "None" else 100 + index)
    assert said[2:] == [None, 1] and len(harness.launches(calls)) == 1


def test_strides_of_extents_of_one_may_change(run: Any) -> None:
    said, _ = run(
        """
        kvb.open()
        call = operands(block_table=tensor((1, 6), "int32", 0x500004, (9, 1)))
        now = [call[name] for name in FIXED]
        now[1] = tensor((1, 6), "int32", 0x500004)
        def look(owner, out):
            out[0] = now[owner - 1]
            return 0
        watch = Watch(LOOK(look), (ctypes.c_void_p * 5)(1, 2, 3, 4, 5))
        say(kvb.step(kvb.bind(call, watch), call))
        """
    )
    assert said is None


def test_a_binding_keeps_no_device_open(run: Any) -> None:
    said, calls = run(
        """
        said = [kvb.bind(operands())[1], kvb.open()]
        step = kvb.bind(operands())
        said += [kvb.close(), kvb.step(step, operands()), kvb.open(), kvb.step(step, operands())]
        kvb.close(); kvb.open(1)
        say(said + [kvb.step(step, operands())])
        """
    )
    closed = "DeviceError: step: cuda:0 is not open in this launcher. Call open for it first"
    assert said[0] == closed.replace("step", "bind")
    assert said[1:6] == [None, None, [3, closed], None, None]
    assert said[6][0] == 2 and "(cuda:1), found one on cuda:0" in said[6][1]
    assert len(harness.launches(calls)) == 1


def test_a_forked_child_is_told(run: Any) -> None:
    said, calls = run(
        """
        kvb.open()
        step = kvb.bind(operands())
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writer, json.dumps([kvb.step(step, operands()), kvb.bind(operands())]).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        say(json.loads(os.read(reader, 65536)) + [kvb.step(step, operands())])
        """
    )
    for answer, function in zip(said[:2], ("step", "bind"), strict=True):
        assert answer[0] == 3
        assert answer[1].startswith(f"DeviceError: {function}: this process was forked from one")
    assert said[2] is None and len(harness.launches(calls)) == 1


def test_threads_share_a_binding_while_the_device_opens_and_closes(run: Any) -> None:
    said, _ = run(
        """
        import threading
        kvb.open()
        step, answers = kvb.bind(operands()), []
        def work():
            answers.extend(kvb.step(step, operands()) for _ in range(200))
        def churn():
            for _ in range(50):
                kvb.open(); kvb.close(); kvb.unbind(kvb.bind(operands()))
        threads = [threading.Thread(target=work) for _ in range(4)] + [threading.Thread(target=churn)]
        [thread.start() for thread in threads]; [thread.join() for thread in threads]
        say([len(answers), [answer for answer in answers if answer], kvb.counters()[0]])
        """,
        KVB_STANDIN_LOG="/dev/null",
    )
    assert said == [800, [], 800]


def test_the_drivers_words_arrive_and_the_interpreter_is_resumed(run: Any) -> None:
    said, _ = run(WATCHED + "say([kvb.step(step, call), seen[-2:]])", KVB_STANDIN_FAIL="cuLaunchKernel=2")
    words = "DeviceError: cuLaunchKernel: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"
    assert said == [[3, words], ["pause", 7]]


# From here on through TVM-FFI, on the cpu, with tensors of numpy.

BUILT: dict[str, harness.Bench] = {}


class Functions:
    def __init__(self, path: Path) -> None:
        import tvm_ffi

        library = ctypes.CDLL(str(path))
        for name in ("open", "compress", "bind", "close", "counters"):
            address = ctypes.cast(getattr(library, f"__tvm_ffi_{name}"), ctypes.c_void_p).value
            function = tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=library)
            setattr(self, name, function)


@pytest.fixture
def ffi(session_folder: Path, host_arch: str) -> Any:
    if not BUILT:
        folder = session_folder / f"launcher-bind-{os.getpid()}"
        BUILT["cpu"] = harness.Bench.build(harness.cpu_target(host_arch), {}, folder)
    functions = Functions(BUILT["cpu"].launcher)
    functions.open(0, harness.manifest_of(BUILT["cpu"].target), {})
    yield functions
    functions.close(0)


class Given:
    """A call of one output, as numpy arrays."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.fixed = [
            generator.standard_normal((17, 8, 1024), dtype=np.float32),
            np.arange(16, dtype=np.int32).reshape(1, 16),
            np.ones(512, np.float32),
            np.ones((128, 64), np.float32),
            np.full((2, 37440), 0xAB, np.uint8),
        ]
        self.varying = [
            np.zeros(128, np.int32), np.arange(128, dtype=np.int64), np.full(1, 127, np.int64),
            np.arange(128, dtype=np.int64),
        ]  # fmt: skip

    def whole(self) -> list[Any]:
        state, table, weight, cos_sin, cache = self.fixed
        requests, positions, boundaries, slots = self.varying
        return [state, requests, positions, boundaries, table, weight, cos_sin, slots, cache, 8, 128, 1e-6]


def test_bound_bytes_are_the_whole_calls(ffi: Any) -> None:
    bound, whole = Given(), Given()
    before = struct.unpack("<2q", ffi.counters(0))
    step = ffi.bind(*bound.fixed, 8, 128, 1e-6)
    assert step(*bound.varying) is None
    ffi.compress(*whole.whole())
    assert (bound.fixed[4] != 0xAB).any() and (bound.fixed[4] == whole.fixed[4]).all()
    assert struct.unpack("<2q", ffi.counters(0)) == (before[0] + 2, 0)


def test_the_bound_function_alone_keeps_the_tensors_alive(ffi: Any) -> None:
    given = Given()
    step = ffi.bind(*given.fixed, 8, 128, 1e-6)
    held = [weakref.ref(array) for array in given.fixed]
    expected = given.fixed[4].copy()
    whole = given.whole()
    ffi.compress(*whole[:8], expected, *whole[9:])
    given.fixed.clear()
    whole.clear()
    assert all(reference() is not None for reference in held)
    step(*given.varying)
    cache = held[4]()
    assert (cache == expected).all()
    del step, cache
    assert all(reference() is None for reference in held)


@pytest.mark.parametrize("index", range(5))
def test_fixed_tensors_that_are_passed_again_are_compared(ffi: Any, index: int) -> None:
    given = Given()
    step = ffi.bind(*given.fixed, 8, 128, 1e-6)
    step(*given.varying, *given.fixed)
    written = given.fixed[4].copy()
    given.fixed[4][:] = 0
    other = [array.copy() if at == index else array for at, array in enumerate(given.fixed)]
    names = ("state_cache", "block_table", "rms_norm_weight", "cos_sin_cache", "kv_cache")
    with pytest.raises(ValueError, match=f"^{names[index]}: wanted the tensor as it was bound, found other"):
        step(*given.varying, *other)
    assert not given.fixed[4].any()
    step(*given.varying, *given.fixed)
    assert (given.fixed[4][written != 0xAB] == written[written != 0xAB]).all()


def test_wrong_arguments(ffi: Any) -> None:
    given = Given()
    with pytest.raises(TypeError, match="^bind: wanted 8 arguments, found 5"):
        ffi.bind(*given.fixed)
    with pytest.raises(TypeError, match="^watch: wanted a pointer, found an int"):
        ffi.bind(*given.fixed, 8, 128, 1e-6, 5)
    with pytest.raises(TypeError, match="^kv_cache: wanted a tensor, found None"):
        ffi.bind(*given.fixed[:4], None, 8, 128, 1e-6)
    with pytest.raises(TypeError, match="^rms_norm_eps: wanted a float, found a str"):
        ffi.bind(*given.fixed, 8, 128, "eps")
    step = ffi.bind(*given.fixed, 8, 128, 0)
    with pytest.raises(TypeError, match="^step: wanted 4 arguments, found 3"):
        step(*given.varying[:3])
    with pytest.raises(TypeError, match="^positions: wanted a tensor, found an int"):
        step(given.varying[0], 1, *given.varying[2:])
    with pytest.raises(TypeError, match="^block_table: wanted a tensor, found None"):
        step(*given.varying, given.fixed[0], None, *given.fixed[2:])
