"""The tuning space: every tile config that `kvbuild tune` chooses among. Pure data; imports no triton."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product

from ..contract import HEAD_DIM, LEAF_ROWS, STATE_WIDTH
from .route import STREAM_ROWS, Tile

# form: block_t, and the values of block_d, split, num_warps, num_stages to try; what prototypes found far
# behind is left out. Simpler forms first: a call that nobody pins takes the first candidate.
SPACE: Mapping[str, tuple[int, tuple[tuple[int, ...], ...]]] = {
    "stream": (STREAM_ROWS, ((HEAD_DIM,), (1,), (4,), (1, 2, 3, 4))),
    "cluster": (LEAF_ROWS, ((64, 128), (1,), (4,), (1, 2, 3, 4))),
    "block": (LEAF_ROWS, ((HEAD_DIM,), (1, 2, 4, 8), (2, 4, 8), (1, 2, 3))),
}
# What a kernel needs besides its ring of rows.
OTHER_SHARED = 4096
_FLOAT = 4


def candidates(forms: Collection[str], shared_memory: int) -> tuple[Tile, ...]:
    """The tiles of the space that an arch can run: with those forms, and that many bytes of shared memory
    a thread block."""
    return tuple(
        tile
        for form, (block_t, (dims, splits, warps, stages)) in SPACE.items()
        if form in forms
        for split, block_d, num_warps, num_stages in product(splits, dims, warps, stages)
        for tile in (Tile(block_t, block_d, split, num_warps, num_stages, form == "cluster"),)
        if ring_bytes(tile) + OTHER_SHARED <= shared_memory
    )


def ring_bytes(tile: Tile) -> int:
    """Shared memory that the rows under way take in one thread block, at most."""
    if tile.form == "cluster":
        # A leaf of each of the eight parts, values and scores of the block's own dimensions.
        return tile.num_stages * 256 * tile.block_d
    return tile.num_stages * tile.block_t * STATE_WIDTH * _FLOAT * tile.block_d // HEAD_DIM
