"""The operator beside others that compute the same, on the same inputs, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...kernels import oracle, reference, verdict
from ...kernels.contract import COMPRESS_RATIOS, HEAD_DIM, LEAF_ROWS
from ...kernels.gpgpu.route import GENERAL_STAGES, Tile
from ...kernels.workloads import DECODE_OUTPUTS, WORKLOADS, Inputs, Workload
from . import ceiling, timing
from .place import Place
from .rotation import COLD_BYTES, cold_sets, rotation, slices
from .timing import Timing
from .variants import chosen

OURS, EAGER, REPLAYED, COMPILED = "kvbuild", "PyTorch eager", "PyTorch in a graph", "torch.compile"
JIT, WHOLE_WINDOW = "Triton JIT", "whole window, two kernels"
CALLERS = (OURS, EAGER, REPLAYED, COMPILED, JIT, WHOLE_WINDOW)
HOST_CALLERS = (OURS, EAGER)

# What a quick look at the host target makes do with, though a large cache may hold it.
QUICK_HOST_BYTES = 64 << 20

# One launch, no scratch: what every Triton can compile.
PLAIN_TILE = Tile(LEAF_ROWS, HEAD_DIM, 1, 4, GENERAL_STAGES)

Call = Callable[[], object]


class Unavailable(Exception):
    """Why a caller cannot be measured here, or on this workload."""


@dataclass(frozen=True)
class Effort:
    """quick: the smallest workloads and one ratio of decode steps. calls: in a graph, at least. replays,
    slow_replays: of graphs, and of those that take long. eager: repeats of eager calls. compile_seconds: for
    torch.compile in all."""

    quick: bool
    calls: int = 64
    replays: int = 20
    slow_replays: int = 5
    eager: int = 5
    compile_seconds: float = 150.0

    def workloads(self) -> list[Workload]:
        prefills = WORKLOADS[: len(COMPRESS_RATIOS)] if self.quick else WORKLOADS
        ratios = COMPRESS_RATIOS[:1] if self.quick else COMPRESS_RATIOS
        return [*prefills, *(Workload.decode(n, ratio, 0) for ratio in ratios for n in DECODE_OUTPUTS if n)]


@dataclass
class Row:
    """One workload. times: by caller; reasons: of the callers without a time; wrong: bytes by caller."""

    workload: Workload
    sets: int
    ceiling: Timing
    ceiling_by: str
    times: dict[str, Timing] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        ours = self.times[OURS].median
        return {
            "name": self.workload.name,
            "outputs": self.workload.num_outputs,
            "ratio": self.workload.compress_ratio,
            "bytes": self.workload.window_bytes,
            "sets": self.sets,
            "ceiling": {**self.ceiling.to_json(), "by": self.ceiling_by},
            "callers": {
                name: {
                    **each.to_json(),
                    "of_ceiling": round(self.ceiling.median / each.median, 4),
                    "times_kvbuild": round(each.median / ours, 3),
                    "wrong_bytes": self.wrong[name],
                    **({"note": self.notes[name]} if name in self.notes else {}),
                }
                for name, each in self.times.items()
            },
            "not_measured": dict(self.reasons),
        }


class Versus:
    """Measures on one device. say: takes a line of progress."""

    def __init__(self, operator: Any, place: Place, effort: Effort, say: Callable[[str], None]) -> None:
        self.operator, self.place, self.effort, self.say = operator, place, effort, say
        self.reader, self.no_reader = ceiling.reader() if place.is_gpu else (None, "")
        self.callers = CALLERS if place.is_gpu else HOST_CALLERS
        self._ceilings: dict[tuple[int, int], tuple[Timing, str]] = {}
        self._compiling = 0.0
        self._uncompilable: dict[str, str] = {}

    def row(self, workload: Workload) -> Row:
        """Times every caller on one workload; the bytes of each are held against the oracle."""
        cold = QUICK_HOST_BYTES if self.effort.quick and not self.place.is_gpu else COLD_BYTES
        sets = cold_sets(workload, cold)
        inputs, pool = rotation(workload, self.place.device, sets)
        row = Row(workload, sets, *self._ceiling(workload, pool, sets))
        expected = oracle.expect(*inputs[0].call_args())
        for name in self.callers:
            owns = [each.fresh() for each in inputs]
            try:
                row.times[name] = self._time(name, owns, row)
            except Unavailable as reason:
                row.reasons[name] = str(reason)
                continue
            except Exception as error:  # another's compiler or capture: a reason to show, not ours to raise
                if name == OURS:
                    raise
                row.reasons[name] = in_short(error)
                continue
            found = verdict.judge(owns[0].kv_cache, inputs[0].kv_cache, expected)
            row.wrong[name] = found.wrong + found.untouched_changed
        del inputs, pool
        if self.place.is_gpu:
            torch.cuda.empty_cache()
        ours = row.times[OURS].median
        self.say(f"{workload.name}: {ours:.1f} us, reading {row.ceiling.median:.1f} us "
                 f"({row.ceiling.median / ours:.2f})")  # fmt: skip
        return row

    def _ceiling(self, workload: Workload, pool: torch.Tensor, sets: int) -> tuple[Timing, str]:
        key = workload.window_bytes, sets
        if key not in self._ceilings:
            pieces = slices(pool, workload, sets)
            if self.place.is_gpu:
                found = ceiling.best(self.reader, pieces, self._rounds(sets))
            else:
                found = ceiling.host(pieces, self._repeats())
            self._ceilings[key] = found
        return self._ceilings[key]

    def _rounds(self, sets: int) -> int:
        return max(1, -(-self.effort.calls // sets))

    def _repeats(self) -> int:
        return 5 if self.effort.quick else self.effort.replays

    def _time(self, name: str, owns: Sequence[Inputs], row: Row) -> Timing:
        if name == EAGER or not self.place.is_gpu:
            function = self.operator.compress if name == OURS else reference.compress
            turn = _in_turn([partial(function, *own.call_args()) for own in owns])
            # The first input too, whose bytes are looked at.
            repeats = self.effort.eager if name == EAGER else max(len(owns), self._repeats())
            return timing.until_done(turn, self.place.synchronize, repeats)
        if name == WHOLE_WINDOW:
            return self._whole_window(owns, row)
        if name == COMPILED:
            return self._compiled(owns)
        if name == REPLAYED:
            return self._replay([partial(reference.compress_plain, *own.call_args()) for own in owns], True)
        if name == JIT:
            made = [self.jit_call(own) for own in owns]
            if made[0][1]:
                row.notes[JIT] = made[0][1]
            return self._replay([call for call, _ in made], False)
        return self._replay([partial(self.operator.compress, *own.call_args()) for own in owns], False)

    def _replay(self, calls: Sequence[Call], slow: bool) -> Timing:
        calls[0]()
        rounds = 1 if slow else self._rounds(len(calls))

        def body() -> None:
            for _ in range(rounds):
                for call in calls:
                    call()

        replays = self.effort.slow_replays if slow else self.effort.replays
        warm_up = 1 if slow else timing.WARM_UP
        return timing.replay(timing.capture(body), rounds * len(calls), replays, warm_up)

    def _compiled(self, owns: Sequence[Inputs]) -> Timing:
        if self._compiling > self.effort.compile_seconds:
            raise Unavailable(f"torch.compile has taken {self._compiling:.0f} s already")
        _need_triton()
        begin = time.monotonic()
        torch._dynamo.reset()
        compiled = torch.compile(reference.compress_plain, fullgraph=True, dynamic=False)
        compiled(*owns[0].call_args())
        self.place.synchronize()
        self._compiling += time.monotonic() - begin
        return self._replay([partial(compiled, *own.call_args()) for own in owns], True)

    def _whole_window(self, owns: Sequence[Inputs], row: Row) -> Timing:
        jit = _need_triton()
        found = []
        for block_d, warps in jit.WHOLE_WINDOW_SHAPES:
            calls = [jit.whole_window(own, block_d, warps) for own in owns]
            name = f"[{owns[0].compress_ratio}, {block_d}] tiles, {warps} warps"
            found.append((self._replay(calls, False), name))
        best, row.notes[WHOLE_WINDOW] = min(found, key=lambda each: each[0].median)
        return best

    def jit_call(self, inputs: Inputs) -> tuple[Call, str]:
        """The kernel that the operator would launch for these inputs, through Triton's JIT.

        Where this Triton cannot compile it, which older ones cannot where it is written in Gluon, the plain
        Triton kernel of one launch takes its place, and the text says so.
        """
        jit = _need_triton()
        outputs = int(inputs.boundary_token_indices.shape[0])
        variant = chosen(self.operator.variants, inputs.compress_ratio, True, outputs)
        (kernel,) = (each for each in self.operator.target.kernels if each.name == variant.kernels[0])
        tile = Tile(**kernel.tile.to_json())
        if tile.form not in self._uncompilable:
            call: Call = jit.same_kernels(inputs, tile)
            if tile.form == "block":
                return call, ""
            try:
                call()
                return call, ""
            except Exception as error:  # whatever another version's compiler raises
                self._uncompilable[tile.form] = in_short(error)
        plain: Call = jit.same_kernels(inputs, PLAIN_TILE)
        why = self._uncompilable[tile.form]
        return plain, f"the plain kernel {PLAIN_TILE.tag}, for this Triton cannot compile the other: {why}"


def in_short(error: Exception) -> str:
    """A caller's failure as one line of a table."""
    first, *_ = [*str(error).strip().splitlines(), ""]
    return f"{type(error).__name__}: {first}"[:300]


def _in_turn(calls: Sequence[Call]) -> Call:
    state = {"next": 0}

    def call() -> object:
        at = state["next"]
        state["next"] = (at + 1) % len(calls)
        return calls[at]()

    return call


def _need_triton() -> Any:
    """aot.measure.jit. Unavailable where Triton is not installed."""
    try:
        import triton  # noqa: F401

        from . import jit
    except ImportError:
        raise Unavailable("Triton is not installed here; get it with: pip install triton==3.9.0") from None
    return jit
