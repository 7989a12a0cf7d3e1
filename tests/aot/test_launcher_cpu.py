"""The cpu launcher: through TVM-FFI with real tensors, and through plain C where there is no TVM-FFI."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "standin"))
import harness

BUILT: dict[str, harness.Bench] = {}


@pytest.fixture
def bench(session_folder: Path, host_arch: str) -> harness.Bench:
    if "cpu" not in BUILT:
        folder = session_folder / f"launcher-cpu-{os.getpid()}"
        BUILT["cpu"] = harness.Bench.build(harness.cpu_target(host_arch), {}, folder)
    return BUILT["cpu"]


class Functions:
    """The launcher's TVM-FFI functions, as the runtime gets them."""

    def __init__(self, path: Path) -> None:
        import tvm_ffi

        library = ctypes.CDLL(str(path))

        def function(name: str) -> Callable[..., Any]:
            address = ctypes.cast(getattr(library, f"__tvm_ffi_{name}"), ctypes.c_void_p).value
            return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=library)

        self.open, self.compress = function("open"), function("compress")
        self.close, self.counters = function("close"), function("counters")


@pytest.fixture
def kvb(bench: harness.Bench) -> Any:
    functions = Functions(bench.launcher)
    functions.open(0, harness.manifest_of(bench.target), {})
    yield functions
    functions.close(0)


def arguments(num_outputs: int = 1) -> list[Any]:
    generator = np.random.default_rng(0)
    tokens = 128
    return [
        generator.standard_normal((17, 8, 1024), dtype=np.float32),
        np.zeros(tokens, np.int32),
        np.arange(tokens, dtype=np.int64),
        np.full(num_outputs, tokens - 1, np.int64),
        np.arange(16, dtype=np.int32).reshape(1, 16),
        np.ones(512, np.float32),
        np.concatenate([np.ones((tokens, 32), np.float32), np.zeros((tokens, 32), np.float32)], axis=1),
        np.arange(tokens, dtype=np.int64),
        np.full((2, 37440), 0xAB, np.uint8),
        8,
        128,
        1e-6,
    ]


def test_compress_writes_its_slot_and_no_other_byte(kvb: Any) -> None:
    given = arguments()
    cache = given[8]
    assert kvb.compress(*given) is None
    page, offset = divmod(127, 64)
    payload = slice(offset * 576, (offset + 1) * 576)
    scales = slice(64 * 576 + offset * 8, 64 * 576 + (offset + 1) * 8)
    assert (cache[page, payload] != 0xAB).sum() > 500
    assert cache[page, scales][7] == 0 and (cache[page, scales][:7] < 160).all()
    cache[page, payload] = cache[page, scales] = 0xAB
    assert (cache == 0xAB).all()


def test_counters(kvb: Any) -> None:
    before = struct.unpack("<2q", kvb.counters(0))
    kvb.compress(*arguments())
    kvb.compress(*arguments(num_outputs=0))
    with pytest.raises(ValueError, match="compress_ratio"):
        kvb.compress(*arguments()[:10], 64, 1e-6)
    assert struct.unpack("<2q", kvb.counters(0)) == (before[0] + 2, 0)


@pytest.mark.parametrize(
    ("position", "value", "error", "text"),
    [
        (0, [1.0], TypeError, "state_cache: wanted a tensor, found a list or tuple"),
        (0, (1.0,), TypeError, "state_cache: wanted a tensor, found a list or tuple"),
        (1, None, TypeError, "token_to_req: wanted a tensor, found None"),
        (2, "positions", TypeError, "positions: wanted a tensor, found a str"),
        (2, "pos", TypeError, "positions: wanted a tensor, found a str"),
        (3, 7, TypeError, "boundary_token_indices: wanted a tensor, found an int"),
        (4, 1.5, TypeError, "block_table: wanted a tensor, found a float"),
        (5, True, TypeError, "rms_norm_weight: wanted a tensor, found a bool"),
        (6, {"a": 1}, TypeError, "cos_sin_cache: wanted a tensor, found a dict"),
        (7, b"12345678", TypeError, "kv_slot_mapping: wanted a tensor, found bytes"),
        (8, object(), TypeError, "kv_cache: wanted a tensor, found a Python object that is no tensor"),
        (9, 8.0, TypeError, "block_size: wanted an int, found a float"),
        (9, True, TypeError, "block_size: wanted an int, found a bool"),
        (10, "128", TypeError, "compress_ratio: wanted an int, found a str"),
        (10, 2**80, TypeError, "compress_ratio: wanted an int, found an int beyond 64 bits"),
        (10, 64, ValueError, r"compress_ratio: wanted one that was compiled \(128, 256, 512\), found 64"),
        (11, None, TypeError, "rms_norm_eps: wanted a float, found None"),
        (11, float("nan"), ValueError, "rms_norm_eps: wanted a finite float32 of 0 or more, found nan"),
        (2, np.arange(128, dtype=np.int32), TypeError, "positions: wanted dtype int64, found int32"),
        (2, np.arange(256, dtype=np.int64)[::2], ValueError, "positions: wanted a contiguous tensor, found"),
    ],
)  # fmt: skip
def test_wrong_arguments(kvb: Any, position: int, value: Any, error: type[Exception], text: str) -> None:
    given = arguments()
    given[position] = value
    try:
        with pytest.raises(error, match=text):
            kvb.compress(*given)
    except OverflowError:
        pytest.skip("this tvm_ffi refuses ints beyond 64 bits itself")


def test_int_is_taken_for_eps(kvb: Any) -> None:
    assert kvb.compress(*arguments()[:11], 0) is None


def test_argument_count(kvb: Any) -> None:
    with pytest.raises(TypeError, match="compress: wanted 12 arguments, found 11"):
        kvb.compress(*arguments()[:11])
    with pytest.raises(TypeError, match="open: wanted 3 arguments, found 1"):
        kvb.open(0)


def test_open_and_close(bench: harness.Bench) -> None:
    kvb = Functions(bench.launcher)
    manifest = harness.manifest_of(bench.target)
    for function, given in ((kvb.compress, arguments()), (kvb.close, [0]), (kvb.counters, [0])):
        with pytest.raises(RuntimeError, match="^DeviceError: .*: cpu is not open in this launcher"):
            function(*given)
    for given, error, text in (
        (("0", manifest, {}), TypeError, "device_id: wanted an int, found a str"),
        ((1, manifest, {}), ValueError, "device_id: wanted 0, the only device of a cpu target; found 1"),
        ((-1, manifest, {}), ValueError, "device_id: wanted 0 to 1023, found -1"),
        ((0, "text", {}), TypeError, "manifest: wanted bytes, found a str"),
        (
            (0, b"small", {}),
            ValueError,
            "manifest: wanted one that holds launch table .* found 5 bytes without it",
        ),
        ((0, manifest, None), TypeError, "blobs: wanted a dict of str to bytes, found None"),
    ):
        with pytest.raises(error, match=text):
            kvb.open(*given)
    kvb.open(0, manifest, {})
    kvb.open(0, manifest, {})
    kvb.close(0)
    kvb.compress(*arguments())
    kvb.close(0)
    with pytest.raises(RuntimeError, match="close: cpu is not open"):
        kvb.close(0)


def test_forked_child_computes(kvb: Any) -> None:
    parent = arguments()
    kvb.compress(*parent)
    pid = os.fork()
    if pid == 0:
        child = arguments()
        try:
            kvb.compress(*child)
            os._exit(0 if (child[8] == parent[8]).all() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_another_launcher_loaded_globally_is_not_taken_for_it(bench: harness.Bench, tmp_path: Path) -> None:
    for name in ("first.so", "second.so"):
        (tmp_path / name).write_bytes(bench.launcher.read_bytes())
    ctypes.CDLL(str(tmp_path / "first.so"), mode=os.RTLD_GLOBAL)
    with pytest.raises(RuntimeError, match="close: cpu is not open"):
        Functions(tmp_path / "second.so").close(0)


def test_loads_without_tvm_ffi(bench: harness.Bench, tmp_path: Path) -> None:
    said, _ = bench.run(
        """
        import sys
        weights = (ctypes.c_uint16 * 512)()
        cache = (ctypes.c_uint8 * 37440)()
        state = (ctypes.c_float * (2 * 1024))()
        here = (CPU, 0)
        number = ctypes.addressof
        indices = (ctypes.c_int64 * 1)(0)
        call = operands(
            here,
            state_cache=tensor((2, 1, 1024), "float32", number(state), None, here), block_size=1,
            token_to_req=tensor((1,), "int32", number(indices), None, here),
            positions=tensor((1,), "int64", number(indices), None, here),
            boundary_token_indices=tensor((1,), "int64", number(indices), None, here),
            block_table=tensor((1, 1), "int32", number(indices), None, here),
            rms_norm_weight=tensor((512,), "bfloat16", number(weights), None, here),
            cos_sin_cache=tensor((1, 64), "float32", number(state), None, here),
            kv_slot_mapping=tensor((1,), "int64", number(indices), None, here),
            kv_cache=tensor((1, 37440), "uint8", number(cache), None, here))
        said = [kvb.open(), kvb.compress(call), kvb.counters(), kvb.close()]
        say(said + [list(cache[64 * 576 : 64 * 576 + 8]), "tvm_ffi" in sys.modules])
        """,
        tmp_path,
    )
    assert said == [None, None, [1, 0], None, [107] * 7 + [0], False]
