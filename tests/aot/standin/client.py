"""Runs inside a test's subprocess: the launcher through its plain C interface, with tensors made by hand.

Standard library only, so that a scenario starts fast and nothing but the launcher touches a driver.
"""

from __future__ import annotations

import ctypes
import json
import os
from typing import Any

CPU, CUDA, CUDA_HOST, ROCM, CUDA_MANAGED = 1, 2, 3, 10, 13
INT, UINT, FLOAT, BFLOAT = 0, 1, 2, 4
NAMES = (
    "state_cache", "token_to_req", "positions", "boundary_token_indices", "block_table", "rms_norm_weight",
    "cos_sin_cache", "kv_slot_mapping", "kv_cache",
)  # fmt: skip
FIXED = ("state_cache", "block_table", "rms_norm_weight", "cos_sin_cache", "kv_cache")
VARYING = ("token_to_req", "positions", "boundary_token_indices", "kv_slot_mapping")
DTYPES = {
    "float32": (FLOAT, 32), "int32": (INT, 32), "int64": (INT, 64),
    "bfloat16": (BFLOAT, 16), "uint8": (UINT, 8),
    "float16": (FLOAT, 16), "float64": (FLOAT, 64), "int8": (INT, 8), "bool": (6, 8),
}  # fmt: skip


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class Blob(ctypes.Structure):
    _fields_ = (("sha256", ctypes.c_char_p), ("data", ctypes.c_char_p), ("size", ctypes.c_size_t))


LOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(DLTensor))
FAILED = ctypes.CFUNCTYPE(None)
PAUSE = ctypes.CFUNCTYPE(ctypes.c_void_p)
RESUME = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Watch(ctypes.Structure):
    _fields_ = (
        ("look", LOOK), ("owners", ctypes.c_void_p * 5), ("failed", FAILED), ("pause", PAUSE),
        ("resume", RESUME),
    )  # fmt: skip


def tensor(
    shape: tuple[int, ...], dtype: str, data: int = 0x100000, strides: tuple[int, ...] | None = None,
    device: tuple[int, int] = (CUDA, 0), byte_offset: int = 0, lanes: int = 1,
) -> DLTensor:  # fmt: skip
    """A tensor whose address is a number: a launcher for a device never reads through it."""
    code, bits = DTYPES[dtype]
    array = ctypes.c_int64 * len(shape)
    given = array(*strides) if strides is not None else None
    return DLTensor(data, *device, len(shape), code, bits, lanes, array(*shape), given, byte_offset)


def operands(device: tuple[int, int] = (CUDA, 0), num_outputs: int = 3, **changes: Any) -> dict[str, Any]:
    """A call that every check accepts and every aligned variant serves; `changes` replace operands."""
    call: dict[str, Any] = {
        "state_cache": tensor((5, 8, 1024), "float32", 0x100000, (8208, 1024, 1), device),
        "token_to_req": tensor((7,), "int32", 0x200004, None, device),
        "positions": tensor((7,), "int64", 0x300008, None, device),
        "boundary_token_indices": tensor((num_outputs,), "int64", 0x400008, None, device),
        "block_table": tensor((2, 6), "int32", 0x500004, (9, 1), device),
        "rms_norm_weight": tensor((512,), "bfloat16", 0x600010, None, device),
        "cos_sin_cache": tensor((11, 64), "float32", 0x700010, (80, 1), device),
        "kv_slot_mapping": tensor((7,), "int64", 0x800008, None, device),
        "kv_cache": tensor((3, 37440), "uint8", 0x900010, (37456, 1), device),
        "block_size": 8, "compress_ratio": 128, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    unknown = set(changes) - set(call)
    assert not unknown, unknown
    return call | changes


class Launcher:
    """One launcher, opened by its path; `manifest` and `blobs` come from the test."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ["KVB_TEST_LAUNCHER"])
        self.manifest = os.environ["KVB_TEST_MANIFEST"].encode()
        self.blobs = {
            name: bytes.fromhex(data) for name, data in json.loads(os.environ["KVB_TEST_BLOBS"]).items()
        }
        self.library.kvb_last_error.restype = ctypes.c_char_p
        self.library.kvb_compress.argtypes = [ctypes.POINTER(DLTensor)] * 9 + [
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_double,
            ctypes.c_void_p,
        ]
        self.library.kvb_open.argtypes = (
            ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(Blob), ctypes.c_size_t
        )  # fmt: skip

    def open(
        self, device_id: int = 0, manifest: bytes | None = None, blobs: dict[str, bytes] | None = None
    ) -> Any:
        manifest = self.manifest if manifest is None else manifest
        blobs = self.blobs if blobs is None else blobs
        array = (Blob * len(blobs))(*((name.encode(), data, len(data)) for name, data in blobs.items()))
        return self.answer(self.library.kvb_open(device_id, manifest, len(manifest), array, len(blobs)))

    def compress(self, call: dict[str, Any], stream: int = 0) -> Any:
        tensors = [ctypes.byref(call[name]) if call[name] is not None else None for name in NAMES]
        scalars = (call["block_size"], call["compress_ratio"], call["rms_norm_eps"], stream)
        return self.answer(self.library.kvb_compress(*tensors, *scalars))

    def bind(self, call: dict[str, Any], watch: Watch | None = None) -> Any:
        """A binding, or the failure."""
        binding = ctypes.c_void_p()
        tensors = [ctypes.byref(call[name]) if call[name] is not None else None for name in FIXED]
        scalars = (ctypes.c_int64(call["block_size"]), ctypes.c_int64(call["compress_ratio"]),
                   ctypes.c_double(call["rms_norm_eps"]))  # fmt: skip
        given = ctypes.byref(watch) if watch is not None else None
        failure = self.answer(self.library.kvb_bind(*tensors, *scalars, given, ctypes.byref(binding)))
        return binding if failure is None else failure

    def step(self, binding: ctypes.c_void_p | None, call: dict[str, Any], stream: int = 0) -> Any:
        tensors = [ctypes.byref(call[name]) if call[name] is not None else None for name in VARYING]
        return self.answer(self.library.kvb_step(binding, *tensors, ctypes.c_void_p(stream)))

    def unbind(self, binding: ctypes.c_void_p | None) -> None:
        self.library.kvb_unbind(binding)

    def close(self, device_id: int = 0) -> Any:
        return self.answer(self.library.kvb_close(device_id))

    def counters(self, device_id: int = 0) -> list[int]:
        values = (ctypes.c_int64 * 32)()
        count = ctypes.c_size_t()
        answer = self.answer(
            self.library.kvb_counters(device_id, values, ctypes.c_size_t(32), ctypes.byref(count))
        )
        return list(values[: count.value]) if answer is None else answer

    def answer(self, code: int) -> Any:
        return None if code == 0 else [code, self.library.kvb_last_error().decode()]


def say(value: Any) -> None:
    """The scenario's result, for the test to read."""
    print(json.dumps(value))
