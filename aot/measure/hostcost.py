"""What a call costs the thread that makes it, by caller."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...kernels import reference
from ...kernels.workloads import Inputs, Workload, make
from . import timing
from .bare import BareLaunch
from .variants import chosen
from .versus import EAGER, JIT, OURS, Call, Unavailable, Versus, in_short

BOUND, OPS = "kvbuild, bound", "kvbuild, torch.ops"
BARE, ADD = "the driver's launch alone", "torch x.add_(1)"
OUTPUTS, RATIO = 8, 128


def measure(versus: Versus, blob: Callable[[str], bytes]) -> dict[str, Any]:
    """Microseconds until a call returns, by caller; the device is never waited for. JSON values.

    On a GPU a decode step of 8 outputs; on the cpu, where a call is the work itself, one without outputs.
    """
    place, operator = versus.place, versus.operator
    outputs = OUTPUTS if place.is_gpu else 0
    inputs = make(Workload.decode(outputs, RATIO, 0), device=place.device)
    arguments = inputs.call_args()
    small = torch.zeros(8, device=place.device)
    size = 20 if versus.effort.quick else 200
    notes: dict[str, str] = {}
    makers: dict[str, Callable[[], Call]] = {
        OURS: lambda: partial(operator.compress, *arguments),
        BOUND: lambda: _bound(operator, inputs),
        OPS: lambda: partial(_registered(operator), *arguments),
        EAGER: lambda: partial(reference.compress, *arguments),
        JIT: lambda: _jit(versus, inputs, notes),
        ADD: lambda: partial(small.add_, 1),
    }
    if not place.is_gpu:
        del makers[JIT]
    callers: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, maker in makers.items():
        try:
            call = maker()
            call()
            batch = max(2, size // 10) if name == EAGER else size
            single, mean = timing.until_returned(call, place.synchronize, batch)
            note = {"note": notes[name]} if name in notes else {}
            callers[name] = {**single.to_json(), "batch": round(mean, 4), **note}
        except Unavailable as reason:
            reasons[name] = str(reason)
        except Exception as error:  # another's compiler: a reason to show, not ours to raise
            if name in (OURS, BOUND):
                raise
            reasons[name] = in_short(error)
    if place.is_gpu:
        try:
            callers[BARE] = {"batch": round(bare_us(versus, blob, inputs, size), 4)}
        except (OSError, RuntimeError) as error:
            reasons[BARE] = str(error)
    return {"outputs": outputs, "ratio": RATIO, "callers": callers, "not_measured": reasons}


def bare_us(versus: Versus, blob: Callable[[str], bytes], inputs: Inputs, size: int) -> float:
    """Microseconds of the driver's own launch of the kernels that this call launches, ready to go.

    ctypes' own cost is measured with a C function that does nothing, and taken off. Raises RuntimeError where
    the driver refuses, OSError where there is no libcuda.so.1.
    """
    operator, wait = versus.operator, versus.place.synchronize
    outputs = int(inputs.boundary_token_indices.shape[0])
    variant = chosen(operator.variants, inputs.compress_ratio, True, outputs)
    stream = torch.cuda.current_stream().cuda_stream
    launcher = BareLaunch(blob, operator.target.kernels, variant, inputs, stream)
    launcher.launch()
    _, launched = timing.until_returned(launcher.launch, wait, size)
    _, called = timing.until_returned(launcher.empty, wait, size)
    return launched - called


def _jit(versus: Versus, inputs: Inputs, notes: dict[str, str]) -> Call:
    call, note = versus.jit_call(inputs)
    if note:
        notes[JIT] = note
    return call


def _registered(operator: Any) -> Any:
    """The operator as one of torch's, under a name of this measurement's own."""
    from ...runtime import torch_library

    return torch_library.register(operator, "kvbuild_measure::compress")


def _bound(operator: Any, inputs: Any) -> Call:
    bind = getattr(operator, "bind", None)
    if bind is None:
        raise Unavailable("this operator has no bind")
    fixed = ("state_cache", "block_table", "rms_norm_weight", "cos_sin_cache", "kv_cache", "block_size",
             "compress_ratio")  # fmt: skip
    step = bind(**{name: getattr(inputs, name) for name in fixed})
    return partial(step, inputs.token_to_req, inputs.positions, inputs.boundary_token_indices,
                   inputs.kv_slot_mapping)  # fmt: skip
