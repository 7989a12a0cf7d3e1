"""Every check of a call's arguments: what is refused, in which words, and what is let through."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "standin"))
import harness

TYPE, VALUE = 1, 2

# name: (changed operands, code, message). `T` is client.tensor.
REFUSED = {
    "null": ("positions=None", TYPE, "positions: wanted a tensor, found NULL"),
    "null first": ("state_cache=None", TYPE, "state_cache: wanted a tensor, found NULL"),
    "float64 state": (
        'state_cache=T((5, 8, 1024), "float64")',
        TYPE,
        "state_cache: wanted dtype float32, found float64",
    ),
    "int64 requests": (
        'token_to_req=T((7,), "int64")',
        TYPE,
        "token_to_req: wanted dtype int32, found int64",
    ),
    "int32 positions": ('positions=T((7,), "int32")', TYPE, "positions: wanted dtype int64, found int32"),
    "int32 boundaries": (
        'boundary_token_indices=T((3,), "int32")',
        TYPE,
        "boundary_token_indices: wanted dtype int64, found int32",
    ),
    "int64 table": ('block_table=T((2, 6), "int64")', TYPE, "block_table: wanted dtype int32, found int64"),
    "float16 weight": (
        'rms_norm_weight=T((512,), "float16")',
        TYPE,
        "rms_norm_weight: wanted dtype bfloat16 or float32, found float16",
    ),
    "bfloat16 cos": (
        'cos_sin_cache=T((11, 64), "bfloat16")',
        TYPE,
        "cos_sin_cache: wanted dtype float32, found bfloat16",
    ),
    "int32 slots": (
        'kv_slot_mapping=T((7,), "int32")',
        TYPE,
        "kv_slot_mapping: wanted dtype int64, found int32",
    ),
    "int8 cache": ('kv_cache=T((3, 37440), "int8")', TYPE, "kv_cache: wanted dtype uint8, found int8"),
    "bool cache": ('kv_cache=T((3, 37440), "bool")', TYPE, "kv_cache: wanted dtype uint8, found bool8"),
    "vector lanes": (
        'kv_cache=T((3, 37440), "uint8", lanes=4)',
        TYPE,
        "kv_cache: wanted dtype uint8, found uint8x4",
    ),
    "rank 2 state": (
        'state_cache=T((40, 1024), "float32")',
        VALUE,
        "state_cache: wanted 3 dimensions, found 2",
    ),
    "rank 2 positions": ('positions=T((7, 1), "int64")', VALUE, "positions: wanted 1 dimension, found 2"),
    "rank 1 table": ('block_table=T((12,), "int32")', VALUE, "block_table: wanted 2 dimensions, found 1"),
    "rank 3 cache": ('kv_cache=T((3, 64, 585), "uint8")', VALUE, "kv_cache: wanted 2 dimensions, found 3"),
    "state width": (
        'state_cache=T((5, 8, 512), "float32")',
        VALUE,
        "state_cache: wanted shape[2] = 1024 (512 values, 512 scores), found 512",
    ),
    "weight width": (
        'rms_norm_weight=T((511,), "bfloat16")',
        VALUE,
        "rms_norm_weight: wanted shape[0] = 512, found 511",
    ),
    "cos width": (
        'cos_sin_cache=T((11, 32), "float32")',
        VALUE,
        "cos_sin_cache: wanted shape[1] = 64 (32 cosines, 32 sines), found 32",
    ),
    "positions short": (
        'positions=T((6,), "int64")',
        VALUE,
        "positions: wanted shape[0] = 7 (num_tokens, as token_to_req has), found 6",
    ),
    "slots long": (
        'kv_slot_mapping=T((8,), "int64")',
        VALUE,
        "kv_slot_mapping: wanted shape[0] = 7 (num_tokens, as token_to_req has), found 8",
    ),
    "page small": (
        'kv_cache=T((3, 37375), "uint8")',
        VALUE,
        "kv_cache: wanted shape[1] of at least 37376 bytes (64 slots of 584), found 37375",
    ),
    "pages overlap": (
        'kv_cache=T((3, 37376), "uint8", strides=(37374, 1))',
        VALUE,
        "kv_cache: wanted pages that do not overlap, stride(0) of at least 37376; found 37374",
    ),
    "pages the same": (
        'kv_cache=T((3, 37376), "uint8", strides=(0, 1))',
        VALUE,
        "kv_cache: wanted pages that do not overlap, stride(0) of at least 37376; found 0",
    ),
    "page stride odd": (
        'kv_cache=T((3, 37377), "uint8")',
        VALUE,
        "kv_cache: wanted an even stride(0), found 37377",
    ),
    "cache base odd": (
        'kv_cache=T((1, 37376), "uint8", 0x900001)',
        VALUE,
        "kv_cache: wanted an even base address, found 0x900001",
    ),
    "too many pages": (
        'kv_cache=T((2**58, 37376), "uint8", strides=(2**40, 1))',
        VALUE,
        "kv_cache: wanted extents that 64-bit addresses can reach, found a shape and strides that pass them",
    ),
    "block_size": (
        "block_size=16",
        VALUE,
        "block_size: wanted 8, which is state_cache's shape[1]; found 16",
    ),
    "block_size 0": (
        'block_size=0, state_cache=T((5, 0, 1024), "float32")',
        VALUE,
        "block_size: wanted 1 or more, found 0",
    ),
    "ratio": (
        "compress_ratio=256",
        VALUE,
        "compress_ratio: wanted one that was compiled (128, 512), found 256",
    ),
    "ratio beyond 32 bits": (
        "compress_ratio=2**32 + 128",
        VALUE,
        "compress_ratio: wanted one that was compiled (128, 512), found 4294967424",
    ),
    "eps negative": (
        "rms_norm_eps=-1e-6",
        VALUE,
        "rms_norm_eps: wanted a finite float32 of 0 or more, found -1e-06",
    ),
    "eps nan": (
        'rms_norm_eps=float("nan")',
        VALUE,
        "rms_norm_eps: wanted a finite float32 of 0 or more, found nan",
    ),
    "eps inf": (
        'rms_norm_eps=float("inf")',
        VALUE,
        "rms_norm_eps: wanted a finite float32 of 0 or more, found inf",
    ),
    "eps beyond float32": (
        "rms_norm_eps=1e39",
        VALUE,
        "rms_norm_eps: wanted a finite float32 of 0 or more, found 1e+39",
    ),
    "on the host": (
        'positions=T((7,), "int64", device=(CPU, 0))',
        VALUE,
        "positions: wanted a tensor on cuda:0, the device that was opened and that state_cache lies on; "
        "found one on cpu. Move it there",
    ),
    "on another device": (
        'kv_cache=T((3, 37440), "uint8", device=(CUDA, 1))',
        VALUE,
        "kv_cache: wanted a tensor on cuda:0, the device that was opened and that state_cache lies on; "
        "found one on cuda:1. Move it there",
    ),
    "pinned": (
        'block_table=T((2, 6), "int32", device=(CUDA_HOST, 0))',
        VALUE,
        "block_table: wanted a tensor on cuda:0, the device that was opened and that state_cache lies on; "
        "found one on pinned host memory (CUDA). Move it there",
    ),
    "managed": (
        'state_cache=T((5, 8, 1024), "float32", device=(CUDA_MANAGED, 0))',
        VALUE,
        "state_cache: wanted a tensor on a device of nvidia:sm_90, found one on managed "
        "memory (CUDA). Move it there",
    ),
    "unknown device": (
        'positions=T((7,), "int64", device=(99, 3))',
        VALUE,
        "positions: wanted a tensor on cuda:0, the device that was opened and that state_cache lies on; "
        "found one on DLPack device 99:3. Move it there",
    ),
    "all on a device not opened": (
        'state_cache=T((5, 8, 1024), "float32", device=(CUDA, 1))',
        VALUE,
        "state_cache: wanted a tensor on the device that was opened (cuda:0), found one on cuda:1. "
        "Move it there, or open that device",
    ),
    "strided vector": (
        'positions=T((7,), "int64", strides=(2,))',
        VALUE,
        "positions: wanted a contiguous tensor, found stride(0) = 2. Make it contiguous first",
    ),
    "broadcast vector": (
        'kv_slot_mapping=T((7,), "int64", strides=(0,))',
        VALUE,
        "kv_slot_mapping: wanted a contiguous tensor, found stride(0) = 0. Make it contiguous first",
    ),
    "last stride": (
        'state_cache=T((5, 8, 1024), "float32", strides=(16384, 2048, 2))',
        VALUE,
        "state_cache: wanted a last stride of 1, found stride(2) = 2. Make it contiguous first",
    ),
    "negative stride": (
        'state_cache=T((5, 8, 1024), "float32", strides=(-8192, 1024, 1))',
        VALUE,
        "state_cache: wanted strides of 0 and more, found stride(0) = -8192. Copy it first",
    ),
    "negative extent": (
        'block_table=T((-2, 6), "int32")',
        VALUE,
        "block_table: wanted extents of 0 and more, found shape[0] = -2",
    ),
    "stride overflow": (
        'state_cache=T((5, 8, 1024), "float32", strides=(2**61, 1024, 1))',
        VALUE,
        "state_cache: wanted extents that 64-bit addresses can reach, found a shape and "
        "strides that pass them",
    ),
    "stride overflow back to 0": (
        'state_cache=T((5, 8, 1024), "float32", strides=(2**62, 1024, 1))',
        VALUE,
        "state_cache: wanted extents that 64-bit addresses can reach, found a shape and strides "
        "that pass them",
    ),
    "address overflow": (
        'positions=T((7,), "int64", 2**64 - 16)',
        VALUE,
        "positions: wanted extents that 64-bit addresses can reach, found a shape and strides that pass them",
    ),
    "count overflow": (
        'block_table=T((2**62, 6), "int32", strides=(0, 1))',
        VALUE,
        "block_table: wanted extents that 64-bit addresses can reach, found a shape and "
        "strides that pass them",
    ),
    "count overflow of extents and strides that are small": (
        'state_cache=T((2**30, 2**30, 1024), "float32", strides=(0, 1024, 1)), block_size=2**30',
        VALUE,
        "state_cache: wanted extents that 64-bit addresses can reach, found a shape and "
        "strides that pass them",
    ),
    "address overflow by small strides": (
        'positions=T((7,), "int64", 2**64 - 16, strides=(1,))',
        VALUE,
        "positions: wanted extents that 64-bit addresses can reach, found a shape and strides that pass them",
    ),
    "address overflow by an offset": (
        'positions=T((7,), "int64", 2**64 - 8, strides=(1,), byte_offset=16)',
        VALUE,
        "positions: wanted extents that 64-bit addresses can reach, found a shape and strides that pass them",
    ),
    "int64 alignment by an offset, with strides": (
        'positions=T((7,), "int64", 0x300000, strides=(1,), byte_offset=4)',
        VALUE,
        "positions: wanted an address that is a multiple of its element's 8 bytes, found 0x300004",
    ),
    "null data": (
        'cos_sin_cache=T((11, 64), "float32", 0)',
        VALUE,
        "cos_sin_cache: wanted memory behind its elements, found a null data pointer (a "
        "meta or fake tensor has "
        "one). Pass a real tensor",
    ),
    "null data with an offset": (
        'positions=T((7,), "int64", 0, byte_offset=8)',
        VALUE,
        "positions: wanted memory behind its elements, found a null data pointer (a meta or fake tensor has "
        "one). Pass a real tensor",
    ),
    "int64 alignment": (
        'positions=T((7,), "int64", 0x300004)',
        VALUE,
        "positions: wanted an address that is a multiple of its element's 8 bytes, found 0x300004",
    ),
    "int32 alignment": (
        'block_table=T((2, 6), "int32", 0x500002)',
        VALUE,
        "block_table: wanted an address that is a multiple of its element's 4 bytes, found 0x500002",
    ),
    "float32 alignment": (
        'state_cache=T((5, 8, 1024), "float32", 0x100000, byte_offset=2)',
        VALUE,
        "state_cache: wanted an address that is a multiple of its element's 4 bytes, found 0x100002",
    ),
    "bfloat16 alignment": (
        'rms_norm_weight=T((512,), "bfloat16", 0x600001)',
        VALUE,
        "rms_norm_weight: wanted an address that is a multiple of its element's 2 bytes, found 0x600001",
    ),
    "float32 weight alignment": (
        'rms_norm_weight=T((512,), "float32", 0x600002)',
        VALUE,
        "rms_norm_weight: wanted an address that is a multiple of its element's 4 bytes, found 0x600002",
    ),
}

ACCEPTED = {
    "as it is": "",
    "eps 0": "rms_norm_eps=0.0",
    "float32 weight": 'rms_norm_weight=T((512,), "float32")',
    "block_size 1": 'block_size=1, state_cache=T((5, 1, 1024), "float32", strides=(2048, 7, 1))',
    "block_size 16": 'block_size=16, state_cache=T((5, 16, 1024), "float32")',
    "no tokens, no memory": (
        'token_to_req=T((0,), "int32", 0), positions=T((0,), "int64", 0), kv_slot_mapping=T((0,), "int64", 0)'
    ),
    "no outputs, no memory": 'boundary_token_indices=T((0,), "int64", 0)',
    "no requests": 'block_table=T((0, 6), "int32", 0)',
    "no columns": 'block_table=T((2, 0), "int32", 0)',
    "no pages": 'kv_cache=T((0, 37376), "uint8", 0)',
    "no blocks": 'state_cache=T((0, 8, 1024), "float32", 0)',
    "no positions": 'cos_sin_cache=T((0, 64), "float32", 0)',
    "one page, odd stride": 'kv_cache=T((1, 37376), "uint8", strides=(37377, 1))',
    "one page, no stride": 'kv_cache=T((1, 37376), "uint8", strides=(0, 1))',
    "one column": 'block_table=T((2, 1), "int32", strides=(6, 6))',
    "one token": (
        'token_to_req=T((1,), "int32", strides=(3,)), positions=T((1,), "int64", strides=(-1,)), '
        'kv_slot_mapping=T((1,), "int64", strides=(0,))'
    ),
    "rows repeated": 'state_cache=T((5, 8, 1024), "float32", strides=(8192, 0, 1))',
    "requests repeated": 'block_table=T((2, 6), "int32", strides=(0, 1))',
    "as many rows as the usual checks take, and one more": (
        'cos_sin_cache=T((2**20, 64), "float32", strides=(2**26, 1)), '
        'token_to_req=T((2**20 + 1,), "int32", strides=(1,)), '
        'positions=T((2**20 + 1,), "int64", strides=(1,)), '
        'kv_slot_mapping=T((2**20 + 1,), "int64", strides=(1,))'
    ),
    "rows beyond 32 bits": 'state_cache=T((2**22, 8, 1024), "float32")',
    "smallest page": 'kv_cache=T((3, 37376), "uint8")',
}


def run_all(changes: list[str], session_folder: Path, folder: Path) -> list[tuple[int, str] | None]:
    bench, driver = harness.gpu_bench("nvidia", session_folder)
    calls = ", ".join(f"lambda: operands({change})" for change in changes)
    said, _ = bench.run(
        f"T = tensor\nkvb.open()\nsay([kvb.compress(call()) for call in [{calls}]])", folder, driver
    )
    return [None if answer is None else (answer[0], answer[1]) for answer in said]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("check")


def test_refused(session_folder: Path, folder: Path) -> None:
    said = run_all([change for change, _, _ in REFUSED.values()], session_folder, folder)
    wanted = {name: (code, text) for name, (_, code, text) in REFUSED.items()}
    assert dict(zip(REFUSED, said, strict=True)) == wanted


def test_accepted(session_folder: Path, folder: Path) -> None:
    said = run_all(list(ACCEPTED.values()), session_folder, folder)
    assert dict(zip(ACCEPTED, said, strict=True)) == dict.fromkeys(ACCEPTED)
