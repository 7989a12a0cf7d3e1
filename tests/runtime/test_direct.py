"""Direct calls: that there are some, that they take and refuse what plain ones do, and hold on to nothing."""

from __future__ import annotations

import ctypes
import gc
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvbuild import runtime
from kvbuild.kernels.odd_cases import ODD_CASES, odd_case
from kvbuild.kernels.workloads import Inputs, Workload, make
from kvbuild.runtime import direct
from kvbuild.runtime.arguments import OPERANDS
from kvbuild.runtime.bound import FIXED, VARYING
from kvbuild.runtime.operator import Operator

SMALL = Workload(1, 128, 128)
FAILING = ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value
NAMES = tuple(inspect.signature(Operator.compress).parameters)[1:]


@pytest.fixture(scope="module")
def cpu(cpu_bundle: Path, way: str) -> runtime.Operator:
    return runtime.load(cpu_bundle, device="cpu")


def bound(operator: runtime.Operator, inputs: Inputs) -> Callable[..., Any]:
    names = (*FIXED, "block_size", "compress_ratio", "rms_norm_eps")
    return operator.bind(**{name: getattr(inputs, name) for name in names})


def varying(inputs: Inputs) -> list[Any]:
    return [getattr(inputs, name) for name in VARYING]


def outcome(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The bytes of kv_cache that a call returned, or its error: type and words."""
    try:
        return call(*arguments, **named).numpy().tobytes()
    except Exception as error:
        assert error.__cause__ is None and (error.__suppress_context__ or error.__context__ is None)
        return type(error), str(error)


def plainly(operator: runtime.Operator) -> Callable[..., Any]:
    """The same call the plain way."""
    return types.MethodType(Operator.compress, operator)


def test_torchs_tensors_go_directly(cpu: runtime.Operator, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain way is not even asked."""
    inputs = make(SMALL, seed=1)
    parameter = torch.nn.Parameter(inputs.rms_norm_weight)
    for each in (inputs, inputs.with_(rms_norm_weight=parameter)):
        step = bound(cpu, each)
        if way == "plain":
            assert isinstance(cpu.compress, types.MethodType) and isinstance(step, types.FunctionType)
            continue
        assert isinstance(cpu.compress, types.BuiltinFunctionType)
        assert isinstance(step, types.BuiltinFunctionType)
        with monkeypatch.context() as patch:
            patch.setattr(Operator, "_check_device", None)
            patch.setattr(cpu._launcher, "several", True)
            assert cpu.compress(*each.call_args()) is each.kv_cache
            with pytest.raises(TypeError, match="not callable"):
                plainly(cpu)(*each.call_args())


def test_in_place_is_found_and_used(cpu: runtime.Operator, way: str) -> None:
    """With the exchange API's function gone, tensors of the usual kind do not miss it."""
    if way != "in place":
        pytest.skip("of the first way alone")
    inputs = make(SMALL, seed=1)
    before = inputs.kv_cache.clone()
    wanted = cpu.compress(*inputs.call_args()).clone()
    api = direct.ExchangeAPI.from_address(direct.exchange_api() or 0)
    kept, api.tensor_from_object = api.tensor_from_object, FAILING
    try:
        step = bound(cpu, inputs)
        assert isinstance(step, types.BuiltinFunctionType)
        for call, given in ((step, varying(inputs)), (cpu.compress, inputs.call_args())):
            inputs.kv_cache.copy_(before)
            assert torch.equal(call(*given), wanted)
    finally:
        api.tensor_from_object = kept


def test_signatures_and_words_for_help(cpu: runtime.Operator) -> None:
    wanted = [(each.name, each.default) for each in inspect.signature(plainly(cpu)).parameters.values()]
    found = inspect.signature(cpu.compress).parameters.values()
    assert [(each.name, each.default) for each in found] == wanted
    assert "ompress" in (inspect.getdoc(cpu.compress) or "")
    assert tuple(inspect.signature(bound(cpu, make(SMALL, seed=1))).parameters) == VARYING


@pytest.mark.parametrize("positional", [0, 5, 9, 11, 12])
@pytest.mark.parametrize("order", [1, -1])
def test_keywords(cpu: runtime.Operator, positional: int, order: int) -> None:
    inputs = make(SMALL, seed=2)
    given = inputs.call_args()
    wanted = outcome(cpu.compress, *given)
    named = list(zip(NAMES, given, strict=True))[positional:][::order]
    inputs.kv_cache.fill_(0xAB)
    again = inputs.fresh().call_args()
    assert outcome(cpu.compress, *again[:positional], **dict(named)) == outcome(cpu.compress, *again)
    assert isinstance(wanted, bytes)
    step = bound(cpu, inputs)
    values = list(zip(VARYING, varying(inputs), strict=True))
    count = min(positional, 4)
    step(*varying(inputs)[:count], **dict(values[count:][::order]))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda a: a[:10], {}),
        (lambda a: a[:9], {}),
        (lambda a: a[:0], {}),
        (lambda a: (*a, 1), {}),
        (lambda a: a, {"rms_norm_eps": 1e-6}),
        (lambda a: a[:11], {"eps": 1e-6}),
        (lambda a: a[:11], {"state_cache": 1}),
        (lambda a: a[:10], {"rms_norm_eps": 1e-6}),
        (lambda a: (*a[:9], True, *a[10:]), {}),
        (lambda a: (*a[:9], np.int64(8), *a[10:]), {}),
        (lambda a: (*a[:9], 2**70, *a[10:]), {}),
        (lambda a: (*a[:9], -1, *a[10:]), {}),
        (lambda a: (*a[:9], 8.0, *a[10:]), {}),
        (lambda a: (*a[:10], 2**63, a[11]), {}),
        (lambda a: (*a[:10], 129, a[11]), {}),
        (lambda a: (*a[:11], 0), {}),
        (lambda a: (*a[:11], np.float32(1e-6)), {}),
        (lambda a: (*a[:11], float("nan")), {}),
        (lambda a: (*a[:11], float("inf")), {}),
        (lambda a: (*a[:11], "1e-6"), {}),
        (lambda a: (a[0].double(), *a[1:]), {}),
        (lambda a: (a[0].half(), *a[1:]), {}),
        (lambda a: (a[0].to(torch.complex64), *a[1:]), {}),
        (lambda a: (a[0].transpose(0, 1), *a[1:]), {}),
        (lambda a: (a[0].numpy(), *a[1:]), {}),
        (lambda a: (*a[:8], a[8].to("meta"), *a[9:]), {}),
        (lambda a: (*a[:8], a[8].to_sparse(), *a[9:]), {}),
        (lambda a: (*a[:8], a[8].view(torch.int8), *a[9:]), {}),
        (lambda a: (*a[:8], torch.nested.nested_tensor([a[8].float()]), *a[9:]), {}),
        (lambda a: (a[0], None, *a[2:]), {}),
        (lambda a: (a[0], a[1].expand(2, -1), *a[2:]), {}),
        (lambda a: (a[0].as_subclass(Own), *a[1:]), {}),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
def test_odd_arguments_end_as_in_a_plain_call(
    cpu: runtime.Operator, change: Callable[[Any], Any], named: dict[str, Any]
) -> None:
    inputs = make(SMALL, seed=3)
    wanted = outcome(plainly(cpu), *change(inputs.fresh().call_args()), **named)
    assert outcome(cpu.compress, *change(inputs.fresh().call_args()), **named) == wanted


def fake_view(tensor: torch.Tensor) -> torch.Tensor:
    return within(FakeTensorMode().from_tensor(torch.empty(1 + tensor.numel(), dtype=tensor.dtype)), tensor)


def within(longer: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A view of the shape of `tensor` that begins behind the first element: without memory, its address is
    an offset from null."""
    return longer[1:].view(tensor.shape)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    longer = torch.empty(1 + tensor.numel(), dtype=tensor.dtype)
    view = within(longer, tensor)
    longer.untyped_storage().resize_(0)
    return view


def functional(tensor: torch.Tensor) -> torch.Tensor:
    longer = torch.empty(1 + tensor.numel(), dtype=tensor.dtype)
    return within(torch._to_functional_tensor(longer), tensor)


@pytest.mark.filterwarnings("ignore:.*data pointer of FakeTensor:UserWarning")
@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize(
    ("make_odd", "found"),
    [
        (torch._neg_view, "ones to negate when read; call resolve_neg()"),
        (fake_view, "a FakeTensor"),
        (functional, "a functional one"),
        (freed, "a storage of 0 bytes"),
    ],
)
def test_a_tensor_that_is_not_what_its_memory_holds_is_refused(
    cpu: runtime.Operator, name: str, make_odd: Callable[[torch.Tensor], torch.Tensor], found: str
) -> None:
    inputs = make(SMALL, seed=3)
    before = inputs.kv_cache.clone()
    odd = inputs.with_(**{name: make_odd(getattr(inputs, name))})
    step = bound(cpu, inputs)
    calls = [(cpu.compress, odd.call_args()), (plainly(cpu), odd.call_args())]
    calls.append((bound, (cpu, odd)) if name in FIXED else (step, varying(odd)))
    for call, given in calls:
        kind, text = outcome(call, *given)
        assert kind is ValueError and text.startswith(f"{name}: wanted ") and found in text
    assert torch.equal(inputs.kv_cache, before)


def test_empty_tensors_and_those_of_inference_mode_go_directly(
    cpu: runtime.Operator, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "plain":
        pytest.skip("of the direct ways alone")
    with torch.inference_mode():
        inputs = make(SMALL, seed=3)
    none = torch.empty(0, dtype=torch.int64)
    monkeypatch.setattr(Operator, "_check_device", None)
    monkeypatch.setattr(cpu._launcher, "several", True)
    cpu.compress(*inputs.call_args())
    cpu.compress(*inputs.with_(boundary_token_indices=none).call_args())


def test_a_bound_tensor_that_becomes_negated_is_refused(cpu: runtime.Operator, way: str) -> None:
    if way != "in place":
        pytest.skip("of the first way alone: the others would have to ask Python on each step")
    inputs = make(SMALL, seed=3)
    inputs = inputs.with_(cos_sin_cache=inputs.cos_sin_cache.clone())
    step = bound(cpu, inputs)
    inputs.cos_sin_cache.data = torch._neg_view(inputs.cos_sin_cache.detach())
    kind, text = outcome(step, *varying(inputs))
    assert kind is ValueError and text.startswith("cos_sin_cache: wanted ")


def test_a_tensor_without_memory_of_its_own_ends_as_in_a_plain_call(cpu: runtime.Operator) -> None:
    """Under vmap an argument is of torch's own type, and only its implementation is another."""
    given = list(make(SMALL, seed=3).call_args())
    said = []

    def call(weight: torch.Tensor) -> torch.Tensor:
        assert type(weight) is torch.Tensor
        said.extend(outcome(way, *given[:5], weight, *given[6:]) for way in (cpu.compress, plainly(cpu)))
        return weight

    torch.func.vmap(call)(torch.stack([given[5], given[5]]))
    assert said[0] == said[1] and isinstance(said[0], tuple)


@pytest.mark.parametrize("name", ODD_CASES)
def test_bytes_are_those_of_a_plain_call(cpu: runtime.Operator, name: str) -> None:
    inputs = odd_case(name, seed=1)
    whole, step = inputs.fresh(), inputs.fresh()
    plainly(cpu)(*inputs.call_args())
    cpu.compress(*whole.call_args())
    bound(cpu, step)(*varying(step))
    assert torch.equal(whole.kv_storage, inputs.kv_storage)
    assert torch.equal(step.kv_storage, inputs.kv_storage)


class Own(torch.Tensor):
    """A subclass, of which nothing may be assumed."""


class Refusing(torch.Tensor):
    """A subclass that torch's own operations do not work on."""

    @classmethod
    def __torch_function__(cls, *arguments: object) -> object:
        raise KeyError("not supported")


class Hidden:
    @property
    def __class__(self) -> type:
        raise OSError("gone")


def test_a_subclass_is_read_whatever_it_makes_of_operations(cpu: runtime.Operator) -> None:
    inputs = make(SMALL, seed=3)
    given = list(inputs.fresh().call_args())
    wanted = outcome(cpu.compress, *given)
    again = inputs.fresh()
    refusing = again.state_cache.as_subclass(Refusing)
    assert outcome(cpu.compress, refusing, *again.call_args()[1:]) == wanted
    kind, text = outcome(cpu.compress, refusing, None, *again.call_args()[2:])
    assert kind is TypeError and text.startswith("token_to_req: wanted a tensor")


def test_an_object_that_cannot_be_looked_at_is_named(cpu: runtime.Operator) -> None:
    given = make(SMALL, seed=3).call_args()
    kind, text = outcome(cpu.compress, given[0], Hidden(), *given[2:])
    assert kind is ValueError and text.startswith("token_to_req: wanted a tensor") and text.endswith(": gone")
    assert outcome(cpu.compress, *given[:9], Hidden(), *given[10:])[1].startswith(
        "block_size: wanted an integer"
    )


def test_a_step_with_odd_arguments_ends_as_a_plain_one(cpu: runtime.Operator) -> None:
    inputs = make(SMALL, seed=3)
    step = bound(cpu, inputs)
    given = varying(inputs)
    expected = outcome(step, *given)
    assert outcome(step, *(tensor.numpy() for tensor in given)) == expected
    assert outcome(step, given[0].as_subclass(Own), *given[1:]) == expected
    for wrong, words in (
        (given[:3], "missing 1 required positional argument"),
        ([*given, given[0]], "takes 4 positional arguments but 5 were given"),
        ([given[0].long(), *given[1:]], "token_to_req: wanted dtype int32, found int64"),
        ([*given[:3], given[3][1:]], "kv_slot_mapping: wanted shape"),
    ):
        kind, text = outcome(step, *wrong)
        assert kind in (TypeError, ValueError) and words in text


def test_calls_and_failures_hold_on_to_nothing(cpu: runtime.Operator) -> None:
    inputs = make(SMALL, seed=4)
    given, step = inputs.call_args(), bound(cpu, inputs)
    wrong = inputs.with_(positions=inputs.positions.int()).call_args()
    objects = [*given, *wrong, *varying(inputs), step, cpu.compress, direct, None]

    def make_calls() -> None:
        for _ in range(100):
            cpu.compress(*given)
            cpu.compress(**dict(zip(NAMES, given, strict=True)))
            step(*varying(inputs))
            outcome(cpu.compress, *wrong)
            outcome(cpu.compress, *given[:8])
            outcome(step, wrong[1], wrong[2], wrong[3], wrong[7])

    make_calls()
    gc.collect()
    before = [sys.getrefcount(each) for each in objects]
    blocks = sys.getallocatedblocks()
    make_calls()
    gc.collect()
    after = [sys.getrefcount(each) for each in objects]
    assert max(abs(one - two) for one, two in zip(before, after, strict=True)) < 50
    assert sys.getallocatedblocks() - blocks < 50


def test_a_dropped_operator_is_gone_and_its_functions_work_on(cpu_bundle: Path, way: str) -> None:
    operator = runtime.load(cpu_bundle, device="cpu")
    inputs = make(SMALL, seed=5)
    wanted = outcome(operator.compress, *inputs.call_args())
    compress = operator.compress
    gone = weakref.ref(operator)
    gc.disable()
    try:
        del operator
        assert gone() is None
    finally:
        gc.enable()
    assert outcome(compress, *inputs.call_args()) == wanted


def test_an_operator_that_holds_its_step_is_gone_too(cpu_bundle: Path, way: str) -> None:
    operator = runtime.load(cpu_bundle, device="cpu")
    inputs = make(SMALL, seed=5)
    operator.step = bound(operator, inputs)  # type: ignore[attr-defined]
    gone = weakref.ref(operator)
    del operator
    gc.collect()
    assert gone() is None


def test_a_kept_function_of_a_closed_operator_is_refused(cpu_bundle: Path, way: str) -> None:
    inputs = make(SMALL, seed=5)
    with runtime.load(cpu_bundle, device="cpu") as other, runtime.load(cpu_bundle, device="cpu") as operator:
        compress, step = operator.compress, bound(operator, inputs)
        operator.close()
        before = inputs.kv_cache.clone()
        for call, given in ((compress, inputs.call_args()), (step, varying(inputs))):
            assert outcome(call, *given) == (ValueError, "the operator is closed; load it again")
        assert torch.equal(inputs.kv_cache, before)
        assert isinstance(outcome(other.compress, *inputs.call_args()), bytes)


def test_a_subclass_keeps_its_own_compress(cpu: runtime.Operator) -> None:
    class Counting(Operator):
        calls = 0

        def compress(self, *arguments: Any, **named: Any) -> Any:
            self.calls += 1
            return super().compress(*arguments, **named)

    operator = Counting(cpu._launcher, cpu.target, cpu.facts)
    operator.compress(*make(SMALL, seed=5).call_args())
    assert operator.calls == 1


def test_others_run_while_a_call_computes(cpu: runtime.Operator) -> None:
    """The interpreter switches by itself once in 1000 s here: only a call can let the other thread in."""
    given = make(Workload(1, 8192, 128), seed=1).call_args()
    go, ran = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (go.wait(), ran.set()))
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        go.set()
        for _ in range(1000):
            cpu.compress(*given)
            if ran.is_set():
                break
        let_in = ran.is_set()
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert let_in


@pytest.mark.parametrize(
    "change",
    [lambda t: t.resize_(1, 64), lambda t: t.untyped_storage().resize_(0), lambda t: t.set_(t.clone())],
)
def test_a_changed_tensor_is_seen_by_the_next_call(
    cpu: runtime.Operator, change: Callable[[Any], Any]
) -> None:
    """Nothing of an earlier call is remembered: a whole call reads the tensor as it is now."""
    inputs = make(SMALL, seed=6)
    inputs = inputs.with_(cos_sin_cache=inputs.cos_sin_cache.clone())
    given = inputs.call_args()
    cpu.compress(*given)
    change(given[6])
    assert outcome(cpu.compress, *given) == outcome(plainly(cpu), *given)
