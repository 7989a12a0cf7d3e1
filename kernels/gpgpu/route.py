"""The GPGPU route as data: which kernels a tile config needs, their arguments and constants.

Pure: imports no triton, so that planning, packaging and tests need no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ..contract import HEAD_DIM, LEAF_ROWS, SPECIALISED_BLOCK_SIZE, WINDOW_PARTS

LAYOUTS = ("aligned", "general")
SOURCES = ("compress.py", "scan.py", "finalize.py", "../contract.py")
# Dimensions a warp of the cluster kernel needs at least.
CLUSTER_TILE = 16
FINALIZE_WARPS = 4
STREAM_ROWS = SPECIALISED_BLOCK_SIZE
# Stages of a general kernel whose tile was chosen for another kernel.
GENERAL_STAGES = 2
# form: what its tiles may have as block_d, split, num_warps, num_stages. A stage of a stream is a page of
# 32 KiB in shared memory, a stage of a cluster block 256 bytes a dimension.
FORMS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "block": ((64, 128, 256, 512), (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 3, 4, 5, 6, 7, 8)),
    "stream": ((512,), (1,), (2, 4), (1, 2, 3, 4, 5, 6)),
    "cluster": ((64, 128, 256), (1,), (1, 2, 4, 8, 16), (1, 2, 3, 4)),
}


@dataclass(frozen=True)
class Tile:
    """One tile config.

    block_t: rows a loop step takes: LEAF_ROWS, or 8 to stream whole pages (NVIDIA sm_80 and above).
    block_d: dimensions a thread block owns.
    split:   thread blocks that share the rows of one window, each with its own run of them.
    num_warps: warps a thread block. num_stages: loop steps under way at a time.
    cluster: the blocks of one output form a thread-block cluster and finish it together in one launch
             (NVIDIA sm_90 and above). Without, a block that does not own an output alone leaves it to
             a second launch.
    """

    block_t: int
    block_d: int
    split: int
    num_warps: int
    num_stages: int
    cluster: bool = False

    @classmethod
    def parse(cls, mapping: Mapping[str, object]) -> Tile:
        """Reads a tile from a parsed YAML mapping; ValueError names the key, what was wanted and found."""
        wanted = {field.name: field.type for field in fields(cls)}
        for key in mapping:
            if key not in wanted:
                raise ValueError(f"tile key {key!r}: wanted one of {', '.join(wanted)}")
        values: dict[str, object] = {"cluster": False, **mapping}
        for name, kind in wanted.items():
            if name not in values:
                raise ValueError(f"tile key {name!r}: missing")
            value = values[name]
            right = isinstance(value, bool) if kind == "bool" else type(value) is int and value >= 1
            if not right:
                expected = "true or false" if kind == "bool" else "a positive integer"
                raise ValueError(f"tile key {name!r}: wanted {expected}, found {value!r}")
        tile = cls(**values)  # type: ignore[arg-type]
        tile.check()
        return tile

    def check(self) -> None:
        """Raises ValueError where no kernel of this route implements the combination."""
        dims, splits, warps, stages = FORMS[self.form]
        where = f" where block_t is {self.block_t} and cluster {str(self.cluster).lower()}"
        warps = tuple(n for n in warps if not self.cluster or n * CLUSTER_TILE <= self.block_d)
        rows = (LEAF_ROWS,) if self.cluster else (LEAF_ROWS, STREAM_ROWS)
        wanted = (
            ("block_t", self.block_t, rows),
            ("block_d", self.block_d, dims),
            ("split", self.split, splits),
            ("num_warps", self.num_warps, warps),
            ("num_stages", self.num_stages, stages),
        )
        for name, value, values in wanted:
            if value not in values:
                *some, last = map(str, values)
                either = f"{', '.join(some)} or {last}" if some else last
                condition = "" if name == "block_t" else where
                raise ValueError(f"tile key {name!r}: wanted {either}{condition}, found {value}")

    @property
    def form(self) -> str:
        """Whose kernel an aligned call gets: cluster.py's, stream.py's, or compress.py's (`block`)."""
        if self.cluster:
            return "cluster"
        return "stream" if self.block_t == STREAM_ROWS else "block"

    @property
    def tag(self) -> str:
        """Short form used in kernel names, such as t4d64s1w4n1c."""
        return (
            f"t{self.block_t}d{self.block_d}s{self.split}w{self.num_warps}n{self.num_stages}"
            f"{'c' if self.cluster else ''}"
        )

    def to_json(self) -> dict[str, int | bool]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Arg:
    """One runtime argument: a field of kvb_operands and its Triton type."""

    field: str
    type: str


ARGS: tuple[Arg, ...] = (
    Arg("state_cache", "*fp32"),
    Arg("token_to_req", "*i32"),
    Arg("positions", "*i64"),
    Arg("boundary_token_indices", "*i64"),
    Arg("block_table", "*i32"),
    Arg("rms_norm_weight", "*bf16"),
    Arg("cos_sin_cache", "*fp32"),
    Arg("kv_slot_mapping", "*i64"),
    Arg("kv_cache", "*u8"),
    Arg("scratch", "*fp32"),
    Arg("num_blocks", "i64"),
    Arg("state_page_stride", "i64"),
    Arg("state_row_stride", "i64"),
    Arg("block_size", "i64"),
    Arg("num_tokens", "i64"),
    Arg("num_outputs", "i64"),
    Arg("num_reqs", "i64"),
    Arg("blocks_per_req", "i64"),
    Arg("block_table_stride", "i64"),
    Arg("max_pos", "i64"),
    Arg("cos_sin_stride", "i64"),
    Arg("kv_pages", "i64"),
    Arg("kv_page_stride", "i64"),
    Arg("weight_is_fp32", "i32"),
    Arg("rms_norm_eps", "fp32"),
)

# What the `aligned` layout declares divisible by 16: addresses in bytes, strides in elements. The
# launcher checks each of these (and block_size == 8, bf16 weights) before it picks an aligned variant.
ALIGNED_FIELDS = (
    "state_cache",
    "rms_norm_weight",
    "cos_sin_cache",
    "kv_cache",
    "scratch",
    "state_page_stride",
    "state_row_stride",
    "cos_sin_stride",
    "kv_page_stride",
)


@dataclass(frozen=True)
class KernelForm:
    """One kernel of a variant, before any target is chosen.

    function: the Triton function; source: its file in this folder; sources: every file its text depends on.
    constexprs: compile-time constants; num_ctas: blocks of a cluster.
    per_output, y: the grid is (num_outputs * per_output, y, 1) programs.
    """

    function: str
    source: str
    sources: tuple[str, ...]
    constexprs: tuple[tuple[str, int | bool], ...]
    num_warps: int
    num_stages: int
    num_ctas: int
    per_output: int
    y: int


def general_tile(tile: Tile) -> Tile:
    """The tile that a general call gets where an aligned one gets `tile`: one of compress.py's kernels.

    Where the blocks of a cluster would share an output, as many plain blocks share its rows.
    """
    if tile.form == "block":
        return tile
    split = min(HEAD_DIM // tile.block_d, WINDOW_PARTS)
    return Tile(LEAF_ROWS, HEAD_DIM, split, num_warps=4, num_stages=GENERAL_STAGES)


def _fused(tile: Tile) -> bool:
    return tile.form != "block" or (tile.split == 1 and tile.block_d == HEAD_DIM)


def scratch_per_output(tile: Tile) -> int:
    """Bytes of scratch an output needs: with a second launch, a state of three fp32 vectors a split."""
    return 0 if _fused(tile) else 4 * 3 * HEAD_DIM * tile.split


def kernels_for(ratio: int, layout: str, tile: Tile) -> tuple[KernelForm, ...]:
    """The kernels, in launch order, that compute one output with this tile.

    The cluster and stream kernels know the aligned layout only: see general_tile.
    """
    aligned = layout == "aligned"
    common: tuple[tuple[str, int | bool], ...] = (
        ("RATIO", ratio),
        ("BLOCK_SIZE", SPECIALISED_BLOCK_SIZE if aligned else 0),
    )
    staged = (*common, ("NUM_STAGES", tile.num_stages))
    if tile.form != "block":
        if not aligned:
            raise ValueError(
                f"tile {tile.tag} is for the aligned layout; general_tile gives the general one's"
            )
        form = KernelForm(
            function=f"compress_{tile.form}",
            source=f"{tile.form}.py",
            sources=(*SOURCES, "in_gluon.py", f"{tile.form}.py"),
            constexprs=staged,
            num_warps=tile.num_warps,
            num_stages=1,
            num_ctas=HEAD_DIM // tile.block_d,
            per_output=1,
            y=1,
        )
        return (form,)
    if _fused(tile):
        return (_plain("compress_fused", staged, tile.num_warps, per_output=1),)
    return (
        _plain(
            "compress_scan",
            (*staged, ("SPLIT", tile.split), ("BLOCK_D", tile.block_d)),
            tile.num_warps,
            per_output=tile.split * HEAD_DIM // tile.block_d,
        ),
        _plain("compress_finalize", (*common, ("SPLIT", tile.split)), FINALIZE_WARPS, per_output=1),
    )


def _plain(
    function: str, constexprs: tuple[tuple[str, int | bool], ...], num_warps: int, per_output: int
) -> KernelForm:
    """A kernel of compress.py, which pipelines by its own NUM_STAGES."""
    return KernelForm(function, "compress.py", SOURCES, constexprs, num_warps, 1, 1, per_output, 1)
