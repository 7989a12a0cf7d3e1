"""The Ascend pipeline as data: its stages in order, their arguments, and the memory that lies between them.

Pure: imports no triton, so that planning, packaging, launching and tests read one description.

A call is cut into chunks of outputs. A chunk is a call of its own: `boundary_token_indices` begins at its
first output and `num_outputs` counts its outputs. Its intermediates lie in one scratch allocation
(`scratch_layout`), which the next chunk on the same stream may use again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..contract import (
    HEAD_DIM,
    ROPE_HEAD_DIM,
    SCALE_DIM,
    SPECIALISED_BLOCK_SIZE,
    STATE_WIDTH,
    TOKEN_STRIDE,
)

# What a route asks of a call's operands.
# aligned: block_size is 8, the bases and strides are multiples of 16 bytes and the weight is bf16, as on the
#          GPGPU route.
# dense:   state_cache is num_blocks * block_size rows of 1024 floats without a gap, at least one and at most
#          2^31 - 1 of them, so that an int32 names a row.
# general: nothing beyond the contract.
LAYOUTS = ("aligned", "dense", "general")
ROUTES = ("index_select", "block")

# Rows that enter the sum together. A leaf begins at a position that is a multiple of LEAF_ROWS, whatever the
# route, so that both routes add in the same order.
LEAF_ROWS = 8
# Dimensions a program may own, the best first: fewer groups of dimensions read longer runs.
BLOCK_DIMS = (512, 256, 128, 64)
# What the hardware lets one kernel use of the unified buffer, in bytes.
UB_BYTES = 196_608
# The driver's limit on the programs of one launch.
MAX_PROGRAMS = 65_535
VECTOR_CORES: Mapping[str, int] = {"910B1": 48, "910B2": 48, "910B3": 40, "910B4": 40}

# Each intermediate of the scratch allocation begins at a multiple of this, in bytes.
SCRATCH_ALIGNMENT = 512
# An output's slot and rotary position have a cache line to themselves: two cores never write the same one.
PLACE_WORDS = 8
_SIZES = {"i8": 1, "u8": 1, "i16": 2, "i32": 4, "fp32": 4, "i64": 8}


@dataclass(frozen=True)
class Intermediate:
    """Memory that one stage writes and later ones read: `shape` elements of `dtype` for each output."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes_per_output(self) -> int:
        size = _SIZES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True)
class Argument:
    """One argument of a stage.

    name: the parameter of the Triton function (aclnn: of the operator). type: its Triton type.
    field: a field of kvb_operands, or an intermediate's name where `intermediate` is true.
    """

    name: str
    type: str
    field: str
    intermediate: bool = False


@dataclass(frozen=True)
class Stage:
    """One launch.

    name: unique among all stages of an arch; equal names are the same artifact.
    kind: `triton` (a compiled kernel) or `aclnn` (an operator of CANN's, which has no artifact of ours).
    function: the Triton function, or the operator's name. source: its file in this folder ("" for aclnn);
    sources: every file its text depends on, as paths from this folder.
    arguments: in order, without the constants. constexprs: compile-time constants.
    per_output: work items an output. The grid is (grid(...), 1, 1) programs, which share the items.
    """

    name: str
    kind: str
    function: str
    source: str
    sources: tuple[str, ...]
    arguments: tuple[Argument, ...]
    constexprs: tuple[tuple[str, int], ...]
    per_output: int


def _operand(name: str, type: str, field: str | None = None) -> Argument:
    return Argument(name, type, field or name)


def _between(name: str, type: str) -> Argument:
    return Argument(name, type, name, True)


_ROWS, _LIVE, _GATHERED = _between("rows", "*i32"), _between("live", "*fp32"), _between("gathered", "*fp32")
_PLACE, _COMPRESSED = _between("place", "*i64"), _between("compressed", "*fp32")
_NORMED, _TAIL = _between("normed", "*i16"), _between("tail", "*fp32")
_NUM_OUTPUTS = _operand("num_outputs", "i64")

# What finding an output's window takes: kernels/ascend/locate.py.
_WINDOW = (
    _operand("token_to_req", "*i32"),
    _operand("positions", "*i64"),
    _operand("boundary_token_indices", "*i64"),
    _operand("block_table", "*i32"),
    _operand("kv_slot_mapping", "*i64"),
    _operand("num_blocks", "i64"),
    _operand("block_size", "i64"),
    _operand("num_tokens", "i64"),
    _NUM_OUTPUTS,
    _operand("num_reqs", "i64"),
    _operand("blocks_per_req", "i64"),
    _operand("block_table_stride", "i64"),
    _operand("max_pos", "i64"),
    _operand("kv_pages", "i64"),
)

_CONTRACT = "../contract.py"


def locate(ratio: int) -> Stage:
    """index_select, first: row numbers and liveness of each window, slot and rotary position."""
    return Stage(
        name=f"locate-c{ratio}",
        kind="triton",
        function="locate_rows",
        source="locate.py",
        sources=("locate.py", _CONTRACT),
        arguments=(*_WINDOW, _PLACE, _ROWS, _LIVE),
        constexprs=(("RATIO", ratio),),
        per_output=1,
    )


def gather() -> Stage:
    """index_select, second: CANN copies the rows named by `rows`, [outputs * ratio, 1024], dimension 0."""
    return Stage(
        name="gather",
        kind="aclnn",
        function="aclnnIndexSelect",
        source="",
        sources=(),
        arguments=(
            _operand("self", "*fp32", "state_cache"),
            Argument("index", "*i32", "rows", True),
            Argument("out", "*fp32", "gathered", True),
        ),
        constexprs=(("dim", 0),),
        per_output=1,
    )


def scan(ratio: int, block_d: int) -> Stage:
    """index_select, third: the weighted sum of the gathered rows, one program a group of dimensions."""
    return Stage(
        name=f"scan-c{ratio}-d{block_d}",
        kind="triton",
        function="scan_rows",
        source="scan.py",
        sources=("scan.py", "leaf.py", _CONTRACT),
        arguments=(_NUM_OUTPUTS, _PLACE, _LIVE, _GATHERED, _COMPRESSED),
        constexprs=(("RATIO", ratio), ("BLOCK_D", block_d)),
        per_output=HEAD_DIM // block_d,
    )


def scan_blocks(ratio: int, layout: str, block_d: int) -> Stage:
    """block, first: the weighted sum straight from the state cache's blocks, slot and rotary position."""
    return Stage(
        name=f"blocks-c{ratio}-{layout}-d{block_d}",
        kind="triton",
        function="scan_blocks",
        source="blocks.py",
        sources=("blocks.py", "locate.py", "leaf.py", _CONTRACT),
        arguments=(_operand("state_cache", "*fp32"), *_WINDOW, _operand("state_page_stride", "i64"),
                   _operand("state_row_stride", "i64"), _PLACE, _COMPRESSED),
        constexprs=(("RATIO", ratio), ("BLOCK_SIZE", SPECIALISED_BLOCK_SIZE if layout == "aligned" else 0),
                    ("BLOCK_D", block_d)),
        per_output=HEAD_DIM // block_d,
    )  # fmt: skip


def normalise() -> Stage:
    """RMS norm and weight: the bf16 bits of all dimensions, and the last 64 dimensions as they are."""
    return Stage(
        name="normalise",
        kind="triton",
        function="normalise",
        source="finish.py",
        sources=("finish.py", _CONTRACT),
        arguments=(
            _NUM_OUTPUTS,
            _operand("weight_bf16", "*bf16", "rms_norm_weight"),
            _operand("weight_fp32", "*fp32", "rms_norm_weight"),
            _operand("weight_is_fp32", "i32"),
            _operand("rms_norm_eps", "fp32"),
            _PLACE,
            _COMPRESSED,
            _NORMED,
            _TAIL,
        ),
        constexprs=(),
        per_output=1,
    )


def encode() -> Stage:
    """bf16 bits from memory -> INT8 bytes and scale bytes; the tail rotated, to bf16 bytes."""
    return Stage(
        name="encode",
        kind="triton",
        function="encode",
        source="finish.py",
        sources=("finish.py", _CONTRACT),
        arguments=(
            _NUM_OUTPUTS,
            _operand("cos_sin_cache", "*fp32"),
            _operand("cos_sin_stride", "i64"),
            _PLACE,
            _NORMED,
            _TAIL,
            _between("payload", "*i8"),
            Argument("payload_words", "*i32", "payload", True),
            _between("scales", "*i8"),
        ),
        constexprs=(),
        per_output=1,
    )


def scatter() -> Stage:
    """Payload and scale bytes into their slots of kv_cache; bytes only."""
    return Stage(
        name="scatter",
        kind="triton",
        function="scatter_bytes",
        source="scatter.py",
        sources=("scatter.py", _CONTRACT),
        arguments=(_NUM_OUTPUTS, _operand("kv_cache", "*u8"), _operand("kv_page_stride", "i64"), _PLACE,
                   _between("payload", "*u8"), _between("scales", "*u8")),
        constexprs=(),
        per_output=1,
    )  # fmt: skip


def stages(route: str, ratio: int, layout: str, block_d: int) -> tuple[Stage, ...]:
    """The stages of a route in launch order. layout: `dense` for index_select, else aligned or general."""
    wanted = {"index_select": ("dense",), "block": ("aligned", "general")}[route]
    if layout not in wanted:
        raise ValueError(f"route {route}: wanted layout {' or '.join(wanted)}, found {layout!r}")
    if block_d not in BLOCK_DIMS:
        raise ValueError(f"block_d: wanted one of {BLOCK_DIMS}, found {block_d}")
    first: tuple[Stage, ...]
    if route == "index_select":
        first = (locate(ratio), gather(), scan(ratio, block_d))
    else:
        first = (scan_blocks(ratio, layout, block_d),)
    return (*first, normalise(), encode(), scatter())


def intermediates(route: str, ratio: int) -> tuple[Intermediate, ...]:
    """What lies between the stages of a route, in the order of the scratch allocation.

    place: [0] the slot, -1 where the output is skipped; [1] the row of cos_sin_cache; index_select alone uses
    [2], how many rows of the first leaf lie before the window, and [3], 1 if all rows are live.
    rows: the number of each window row in state_cache seen as [num_blocks * block_size, 1024], 0 where it is
    masked; live: 1.0, or 0.0 where it is masked. gathered: those rows, values then scores.
    compressed: the weighted sums. normed: bf16 bits of the normalised dims; tail: the
    last 64 of these in fp32. payload, scales: a slot's bytes.
    Of a skipped output only `place` and `rows` are written.
    """
    common = (
        Intermediate("place", "i64", (PLACE_WORDS,)),
        Intermediate("compressed", "fp32", (HEAD_DIM,)),
        Intermediate("normed", "i16", (HEAD_DIM,)),
        Intermediate("tail", "fp32", (ROPE_HEAD_DIM,)),
        Intermediate("payload", "u8", (TOKEN_STRIDE,)),
        Intermediate("scales", "u8", (SCALE_DIM,)),
    )
    if route == "block":
        return common
    return (
        *common,
        Intermediate("rows", "i32", (ratio,)),
        Intermediate("live", "fp32", (ratio,)),
        Intermediate("gathered", "fp32", (ratio, STATE_WIDTH)),
    )


def bytes_per_output(route: str, ratio: int) -> int:
    """Bytes of scratch an output needs, alignment not counted."""
    return sum(each.bytes_per_output for each in intermediates(route, ratio))


def least_chunk_bytes(route: str, ratio: int) -> int:
    """The bytes of one output, with the most that alignment may take."""
    return bytes_per_output(route, ratio) + SCRATCH_ALIGNMENT * len(intermediates(route, ratio))


def chunk_outputs(route: str, ratio: int, chunk_bytes: int) -> int:
    """Outputs of one chunk: as many as keep scratch_layout within chunk_bytes. ValueError if not even one."""
    needed = least_chunk_bytes(route, ratio)
    outputs = (chunk_bytes - needed) // bytes_per_output(route, ratio) + 1
    if outputs < 1:
        raise ValueError(f"chunk_bytes: wanted at least {needed} for ratio {ratio}, found {chunk_bytes}")
    # A gather counts its elements in 32 bits somewhere below us, for all that is known.
    return min(outputs, (1 << 31) // (ratio * STATE_WIDTH)) if route == "index_select" else outputs


def scratch_layout(route: str, ratio: int, outputs: int) -> tuple[Mapping[str, int], int]:
    """Where each intermediate of a chunk begins in the scratch allocation, and its size, all in bytes."""
    offsets: dict[str, int] = {}
    end = 0
    for each in intermediates(route, ratio):
        offsets[each.name] = end
        size = each.bytes_per_output * outputs
        end += -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    return offsets, end


def grid(stage: Stage, outputs: int, vector_cores: int) -> int:
    """Programs of a stage's launch for a chunk: the vector cores at most, each taking every so many items."""
    return min(outputs * stage.per_output, vector_cores, MAX_PROGRAMS)
