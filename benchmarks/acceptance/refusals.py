"""Arguments that must be refused by name, before anything is launched or written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvbuild.aot.measure.place import Place
from kvbuild.kernels.contract import OPERANDS
from kvbuild.kernels.workloads import Inputs, Workload, make

from .record import NotRun, Record, Refused

NAMES = (*(operand.name for operand in OPERANDS), "block_size", "compress_ratio", "rms_norm_eps")


def run(record: Record, operator: Any, place: Place, section: str = "refusals") -> None:
    inputs = make(Workload.decode(3, 128), device=place.device)
    for name, makes in _KINDS.items():
        with record.check(section, name) as check:
            arguments = list(makes(inputs, place))
            if not arguments:
                raise NotRun("the device is the cpu")
            for fault, changed, kinds in arguments:
                _refused(operator, inputs, fault, changed, kinds)
            place.synchronize()
            check.detail = f"{len(arguments)} calls refused by the argument's name"


Fault = tuple[str, dict[str, Any], tuple[type[Exception], ...]]


def _refused(operator: Any, inputs: Inputs, name: str, changed: dict[str, Any],
             kinds: tuple[type[Exception], ...]) -> None:
    own = inputs.fresh()
    arguments = dict(zip(NAMES, own.call_args(), strict=True)) | changed
    calls = operator.counters()["calls"]
    try:
        operator.compress(*arguments.values())
    except kinds as error:
        if not str(error).startswith(f"{name}:"):
            raise Refused(f"{name}: refused, but in these words: {error}") from None
    else:
        raise Refused(f"{name}: a call with {_text(changed)} was accepted")
    if operator.counters()["calls"] != calls:
        raise Refused(f"{name}: the refused call was counted as one that passed its checks")
    if not torch.equal(own.kv_storage, inputs.kv_storage):
        raise Refused(f"{name}: the refused call changed kv_cache")


def _text(changed: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value.dtype} {tuple(value.shape)} on {value.device}" if isinstance(value, torch.Tensor)
        else f"{name} {value!r}" for name, value in changed.items())


def _on_the_cpu(inputs: Inputs, place: Place) -> Iterator[Fault]:
    if not place.is_gpu:
        return
    moved = {name: getattr(inputs, name).cpu() for name in NAMES[: len(OPERANDS)]}
    yield "state_cache", moved, (ValueError,)
    for name, value in moved.items():
        yield name, {name: value}, (ValueError,)


def _meta(inputs: Inputs, place: Place) -> Iterator[Fault]:
    for name in NAMES[: len(OPERANDS)]:
        yield name, {name: getattr(inputs, name).to("meta")}, (ValueError, TypeError)


def _wrong_dtypes(inputs: Inputs, place: Place) -> Iterator[Fault]:
    for operand in OPERANDS:
        value = getattr(inputs, operand.name)
        for dtype in (torch.float16, torch.float64, torch.int16, torch.bool):
            yield operand.name, {operand.name: value.to(dtype)}, (TypeError,)
    yield "block_table", {"block_table": [[0]]}, (TypeError,)
    yield "positions", {"positions": None}, (TypeError,)
    yield "compress_ratio", {"compress_ratio": 128.0}, (TypeError,)


def _wrong_values(inputs: Inputs, place: Place) -> Iterator[Fault]:
    for operand in OPERANDS:
        yield operand.name, {operand.name: getattr(inputs, operand.name)[None]}, (ValueError,)
    for name in ("positions", "kv_slot_mapping"):
        yield name, {name: getattr(inputs, name)[:-1]}, (ValueError,)
    twice = torch.zeros((*inputs.state_cache.shape[:2], 2048), device=place.device)
    yield "state_cache", {"state_cache": twice[..., ::2]}, (ValueError,)
    yield "state_cache", {"state_cache": twice}, (ValueError,)
    yield "boundary_token_indices", {
        "boundary_token_indices": torch.zeros(8, dtype=torch.int64, device=place.device)[::2]}, (ValueError,)
    yield "rms_norm_weight", {"rms_norm_weight": inputs.rms_norm_weight[:-1]}, (ValueError,)
    yield "cos_sin_cache", {"cos_sin_cache": inputs.cos_sin_cache[:, :32]}, (ValueError,)
    storage = torch.zeros(3 * 37441 + 1, dtype=torch.uint8, device=place.device)
    yield "kv_cache", {"kv_cache": storage.as_strided((2, 37440), (37441, 1))}, (ValueError,)
    yield "kv_cache", {"kv_cache": storage.as_strided((2, 37440), (37440, 1), 1)}, (ValueError,)
    yield "kv_cache", {"kv_cache": storage.as_strided((2, 37375), (37440, 1))}, (ValueError,)
    yield "block_size", {"block_size": 16}, (ValueError,)
    for ratio in (0, 64, 127, -128):
        yield "compress_ratio", {"compress_ratio": ratio}, (ValueError,)
    for eps in (float("nan"), float("inf"), -1.0):
        yield "rms_norm_eps", {"rms_norm_eps": eps}, (ValueError,)


_KINDS = {
    "tensors on the cpu": _on_the_cpu,
    "meta tensors": _meta,
    "wrong dtypes": _wrong_dtypes,
    "wrong shapes, strides and numbers": _wrong_values,
}
