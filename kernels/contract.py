"""The operator's layout: every byte offset, every constant of the arithmetic, every operand.

This is the one place that knows the bytes. Kernels, launcher, reference and tests read it.
"""

from __future__ import annotations

from dataclasses import dataclass

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
