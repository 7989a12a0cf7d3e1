"""The operator's layout: every byte offset, every constant of the arithmetic, every operand.

This is the one place that knows the bytes. Kernels, launcher, reference and tests read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEAD_DIM = 512
NOPE_HEAD_DIM = 448
ROPE_HEAD_DIM = 64
ROPE_PAIRS = ROPE_HEAD_DIM // 2
QUANT_GROUP = 64
NUM_GROUPS = NOPE_HEAD_DIM // QUANT_GROUP
STATE_WIDTH = 2 * HEAD_DIM

KV_BLOCK_SIZE = 64
TOKEN_STRIDE = NOPE_HEAD_DIM + 2 * ROPE_HEAD_DIM
SCALE_DIM = 8
SCALE_OFFSET = KV_BLOCK_SIZE * TOKEN_STRIDE
SLOT_BYTES = TOKEN_STRIDE + SCALE_DIM
MIN_PAGE_STRIDE = KV_BLOCK_SIZE * SLOT_BYTES

COMPRESS_RATIOS = (128, 256, 512)
SPECIALISED_BLOCK_SIZE = 8

# `e = ceil(log2(a / 127))` without a logarithm: with a = (1 + m/2^23) * 2^E, e = E - 6 while m is at
# most this mantissa (that of 127 = 1.984375 * 2^6), else E - 5.
EXPONENT_MANTISSA_LIMIT = 0x7E0000

INT8_MAX = 127
AMAX_FLOOR = 1.0e-4
SCALE_BIAS = 127
ZERO_GROUP_SCALE_BYTE = 107
DEFAULT_RMS_NORM_EPS = 1.0e-6

# The canonical order of summation. Every GPGPU kernel splits a window into WINDOW_PARTS runs of
# consecutive rows, folds each run leaf by leaf (LEAF_ROWS rows a leaf) and combines the parts in a
# balanced tree, so that no tile config can change a byte.
WINDOW_PARTS = 8
LEAF_ROWS = 4


@dataclass(frozen=True)
class Operand:
    """One tensor operand: `shape` names its extents, `dtypes` lists what is accepted."""

    name: str
    shape: tuple[str, ...]
    dtypes: tuple[str, ...]


OPERANDS: tuple[Operand, ...] = (
    Operand("state_cache", ("num_blocks", "block_size", "1024"), ("float32",)),
    Operand("token_to_req", ("num_tokens",), ("int32",)),
    Operand("positions", ("num_tokens",), ("int64",)),
    Operand("boundary_token_indices", ("num_outputs",), ("int64",)),
    Operand("block_table", ("num_reqs", "blocks_per_req"), ("int32",)),
    Operand("rms_norm_weight", ("512",), ("bfloat16", "float32")),
    Operand("cos_sin_cache", ("max_pos", "64"), ("float32",)),
    Operand("kv_slot_mapping", ("num_tokens",), ("int64",)),
    Operand("kv_cache", ("kv_pages", "page_stride"), ("uint8",)),
)


def check_operands(operands: Mapping[str, Any], block_size: int, compress_ratio: int) -> None:
    """Refuses operands that the contract does not allow; each refusal names the operand.

    `operands` maps the names of OPERANDS to tensors (anything with shape, dtype, stride(), data_ptr() and
    device). TypeError: a wrong dtype. ValueError: a wrong rank, extent, stride, device or alignment, a
    block_size that is not the state cache's, or a ratio outside COMPRESS_RATIOS.
    """
    if compress_ratio not in COMPRESS_RATIOS:
        raise ValueError(f"compress_ratio: wanted one of {COMPRESS_RATIOS}, found {compress_ratio}")
    device = operands["state_cache"].device
    extents: dict[str, tuple[int, str]] = {}
    for operand in OPERANDS:
        tensor = operands[operand.name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in operand.dtypes:
            raise TypeError(f"{operand.name}: wanted dtype {' or '.join(operand.dtypes)}, found {dtype}")
        shape = tuple(tensor.shape)
        if len(shape) != len(operand.shape):
            raise ValueError(f"{operand.name}: wanted [{', '.join(operand.shape)}], found shape {shape}")
        for extent, found in zip(operand.shape, shape, strict=True):
            known = (int(extent), "the contract") if extent.isdigit() else extents.setdefault(
                extent, (found, operand.name))
            if found != known[0]:
                raise ValueError(f"{operand.name}: wanted {extent} = {known[0]} (as {known[1]} has it), "
                                 f"found shape {shape}")
        if shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{operand.name}: wanted a last stride of 1, found {tensor.stride(-1)}; "
                             "pass a copy made with .contiguous()")
        if tensor.device != device:
            raise ValueError(f"{operand.name}: wanted device {device} (state_cache's), found {tensor.device}")
    if block_size != extents["block_size"][0]:
        raise ValueError(f"block_size: wanted {extents['block_size'][0]} (state_cache.shape[1]), "
                         f"found {block_size}")
    kv_cache = operands["kv_cache"]
    if kv_cache.shape[1] < MIN_PAGE_STRIDE:
        raise ValueError(f"kv_cache: wanted shape[1] >= {MIN_PAGE_STRIDE}, found {kv_cache.shape[1]}")
    if kv_cache.stride(0) % 2:
        raise ValueError(f"kv_cache: wanted an even page stride, found {kv_cache.stride(0)}")
    if kv_cache.data_ptr() % 2:
        raise ValueError("kv_cache: wanted an even base address, found an odd one")
