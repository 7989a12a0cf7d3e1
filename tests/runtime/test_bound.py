"""Binding through the operator, on this machine's cpu target: the bytes of whole calls, and refusals."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbuild import runtime
from kvbuild.kernels.odd_cases import ODD_CASES, odd_case, random_case
from kvbuild.kernels.workloads import Inputs, Workload, make
from kvbuild.runtime import bound as module
from kvbuild.runtime import direct
from kvbuild.runtime.bound import FIXED, VARYING

SMALL = Workload(2, 1024, 128)
BOUND = "wanted the tensor as it was bound, found"


@pytest.fixture(scope="module")
def cpu(cpu_bundle: Path, way: str) -> runtime.Operator:
    return runtime.load(cpu_bundle, device="cpu")


def fixed(inputs: Inputs, **changes: Any) -> dict[str, Any]:
    names = (*FIXED, "block_size", "compress_ratio", "rms_norm_eps")
    return {**{name: getattr(inputs, name) for name in names}, **changes}


def varying(inputs: Inputs) -> list[Any]:
    return [getattr(inputs, name) for name in VARYING]


def written(operator: runtime.Operator, inputs: Inputs) -> torch.Tensor:
    """kv_cache as a whole call leaves it."""
    return operator.compress(*inputs.with_(kv_cache=inputs.kv_cache.clone()).call_args())


def launch_of(step: Callable[..., Any]) -> Any:
    """The function under a step that is a Python one."""
    return dict(zip(step.__code__.co_freevars, step.__closure__ or (), strict=True))["launch"].cell_contents


@pytest.mark.parametrize("name", [*ODD_CASES, *range(4)])
def test_a_bound_call_gives_the_bytes_of_a_whole_one(cpu: runtime.Operator, name: str | int) -> None:
    inputs = odd_case(name, seed=1) if isinstance(name, str) else random_case(name)
    whole, bound = inputs.fresh(), inputs.fresh()
    cpu.compress(*whole.call_args())
    step = cpu.bind(**fixed(bound))
    assert step(*varying(bound)) is bound.kv_cache
    assert torch.equal(bound.kv_storage, whole.kv_storage)


def test_a_step_serves_other_outputs_and_contents_than_the_first(cpu: runtime.Operator) -> None:
    inputs, other = make(SMALL, seed=1), make(SMALL, seed=2)
    step = cpu.bind(**fixed(inputs))
    step(*varying(inputs))
    inputs.state_cache.copy_(other.state_cache)
    few = inputs.with_(boundary_token_indices=inputs.boundary_token_indices[:3])
    expected = inputs.kv_cache.clone()
    cpu.compress(*few.with_(kv_cache=expected).call_args())
    step(token_to_req=few.token_to_req, positions=few.positions,
         boundary_token_indices=few.boundary_token_indices, kv_slot_mapping=few.kv_slot_mapping)  # fmt: skip
    assert torch.equal(inputs.kv_cache, expected)


def test_steps_count_like_calls(cpu: runtime.Operator) -> None:
    inputs = make(SMALL, seed=1)
    step = cpu.bind(**fixed(inputs))
    before = cpu.counters()["calls"]
    step(*varying(inputs))
    step(*varying(inputs.with_(boundary_token_indices=inputs.boundary_token_indices[:0])))
    with pytest.raises(TypeError):
        step(*varying(inputs.with_(positions=inputs.positions.int())))
    assert cpu.counters()["calls"] == before + 2


def resize(tensor: torch.Tensor) -> None:
    tensor.resize_(tensor.shape[0] + 1, *tensor.shape[1:])


def shrink(tensor: torch.Tensor) -> None:
    tensor.resize_(tensor.shape[0] - 1, *tensor.shape[1:])


def empty_storage(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def move(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() * 4)


def replace(tensor: torch.Tensor) -> None:
    tensor.set_(tensor.clone())  # type: ignore[call-overload]


def take_bits(tensor: torch.Tensor) -> None:
    """Something that DLPack has no name for: torch's function raises."""
    tensor.data = torch.zeros(tensor.shape, dtype=torch.uint8).view(torch.bits8)


@pytest.mark.parametrize("change", [resize, shrink, empty_storage, move, replace, take_bits])
@pytest.mark.parametrize("name", FIXED)
def test_a_changed_tensor_of_torch_is_refused_by_name(
    cpu: runtime.Operator, name: str, change: Callable[[torch.Tensor], None]
) -> None:
    inputs = make(Workload(1, 128, 128), seed=1)
    inputs = inputs.with_(**{each: getattr(inputs, each).clone() for each in FIXED})
    step = cpu.bind(**fixed(inputs))
    step(*varying(inputs))
    change(getattr(inputs, name))
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{name}: {BOUND}") as error:
            step(*varying(inputs))
        assert error.value.__context__ is None
    cpu.bind(**fixed(make(Workload(1, 128, 128), seed=1)))


def test_a_changed_array_of_numpy_is_refused_by_name(cpu: runtime.Operator) -> None:
    inputs = make(SMALL, seed=2, weight_dtype=torch.float32)
    arrays = {name: getattr(inputs, name).numpy().copy() for name in FIXED}
    step = cpu.bind(**fixed(inputs, **arrays))
    given = [tensor.numpy() for tensor in varying(inputs)]
    assert step(*given) is arrays["kv_cache"]
    expected = cpu.compress(*inputs.call_args()).numpy()
    assert np.array_equal(arrays["kv_cache"], expected)
    arrays["cos_sin_cache"].resize((1 << 16, 64), refcheck=False)
    with pytest.raises(ValueError, match=f"^cos_sin_cache: {BOUND}"):
        step(*given)


def test_a_torch_without_the_exchange_api_passes_all_tensors(
    cpu: runtime.Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_look", lambda tensors: None)
    inputs = make(SMALL, seed=3)
    expected = written(cpu, inputs)
    step = cpu.bind(**fixed(inputs))
    assert torch.equal(step(*varying(inputs)), expected)
    inputs.cos_sin_cache.resize_(4, 64)
    with pytest.raises(ValueError, match=f"^cos_sin_cache: {BOUND}"):
        step(*varying(inputs))


def test_torchs_tensors_are_looked_at_in_c(
    cpu: runtime.Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "step", lambda library, plain, *rest: plain)
    inputs = make(SMALL, seed=3)
    parameter = torch.nn.Parameter(inputs.rms_norm_weight)
    launch = launch_of(cpu.bind(**fixed(inputs, rms_norm_weight=parameter)))
    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        assert not launch.release_gil, "the launcher gives the lock away itself"
    mixed = launch_of(cpu.bind(**fixed(inputs, cos_sin_cache=inputs.cos_sin_cache.numpy())))
    assert not hasattr(mixed, "release_gil")


def test_others_run_while_a_step_computes(cpu: runtime.Operator) -> None:
    """The interpreter switches by itself once in 1000 s here: only a step can let the other thread in."""
    inputs = make(Workload(1, 8192, 128), seed=1)
    step, given = cpu.bind(**fixed(inputs)), varying(inputs)
    go, ran = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (go.wait(), ran.set()))
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        go.set()
        for _ in range(1000):
            step(*given)
            if ran.is_set():
                break
        let_in = ran.is_set()
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert let_in


def test_a_step_keeps_its_tensors_alive_and_no_longer(cpu: runtime.Operator) -> None:
    inputs = make(SMALL, seed=4)
    expected = written(cpu, inputs)
    given = fixed(inputs, **{name: getattr(inputs, name).clone() for name in FIXED})
    held = [weakref.ref(given[name]) for name in FIXED]
    step = cpu.bind(**given)
    given.clear()
    gc.collect()
    assert all(reference() is not None for reference in held)
    assert torch.equal(step(*varying(inputs)), expected)
    del step
    gc.collect()
    assert all(reference() is None for reference in held)


def test_no_python_object_is_kept_by_a_step(cpu: runtime.Operator) -> None:
    inputs = make(Workload(1, 128, 128), seed=4)
    step, given = cpu.bind(**fixed(inputs)), varying(inputs)
    for _ in range(10):
        step(*given)
    gc.collect()
    tracemalloc.start()
    step(*given)
    before = tracemalloc.take_snapshot()
    for _ in range(500):
        step(*given)
    after = tracemalloc.take_snapshot()
    tracemalloc.stop()
    runtime_folder = str(Path(module.__file__).parent / "*")
    kept = after.filter_traces([tracemalloc.Filter(True, runtime_folder)]).compare_to(
        before.filter_traces([tracemalloc.Filter(True, runtime_folder)]), "filename"
    )
    assert sum(each.count_diff for each in kept) < 10


@pytest.mark.parametrize(
    ("name", "change", "kind"),
    [
        ("state_cache", lambda t: t.double(), TypeError),
        ("state_cache", lambda t: t.tolist(), TypeError),
        ("block_table", lambda t: t.to("meta"), ValueError),
        ("rms_norm_weight", lambda t: t[:100], ValueError),
        ("cos_sin_cache", lambda t: None, TypeError),
        ("kv_cache", lambda t: t[:, :100], ValueError),
        ("block_size", lambda n: n + 1, ValueError),
        ("block_size", float, TypeError),
        ("compress_ratio", lambda n: 64, ValueError),
        ("rms_norm_eps", str, TypeError),
        ("rms_norm_eps", lambda e: -e, ValueError),
    ],
)
def test_bind_names_a_wrong_operand(
    cpu: runtime.Operator, name: str, change: Any, kind: type[Exception]
) -> None:
    values = fixed(make(SMALL, seed=5))
    with pytest.raises(kind, match=f"^{name}: wanted") as error:
        cpu.bind(**{**values, name: change(values[name])})
    assert type(error.value) is kind


@pytest.mark.parametrize(
    ("name", "change", "kind"),
    [
        ("token_to_req", lambda t: t.long(), TypeError),
        ("positions", lambda t: t.repeat_interleave(2)[::2], ValueError),
        ("positions", lambda t: t[1:], ValueError),
        ("boundary_token_indices", lambda t: None, TypeError),
        ("boundary_token_indices", lambda t: t.tolist(), TypeError),
        ("kv_slot_mapping", lambda t: t.to("meta"), ValueError),
        ("kv_slot_mapping", lambda t: t.to_sparse(), ValueError),
    ],
)
def test_a_step_names_a_wrong_operand(
    cpu: runtime.Operator, name: str, change: Any, kind: type[Exception]
) -> None:
    inputs = make(SMALL, seed=5)
    step = cpu.bind(**fixed(inputs))
    before = inputs.kv_cache.clone()
    with pytest.raises(kind, match=f"^{name}: wanted") as error:
        step(*varying(inputs.with_(**{name: change(getattr(inputs, name))})))
    assert type(error.value) is kind and torch.equal(inputs.kv_cache, before)


def test_a_closed_operators_step_is_refused_also_where_another_is_open(cpu_bundle: Path) -> None:
    inputs = make(SMALL, seed=6)
    with runtime.load(cpu_bundle, device="cpu") as open_one:
        with runtime.load(cpu_bundle, device="cpu") as operator:
            step = operator.bind(**fixed(inputs))
        for call in (lambda: step(*varying(inputs)), lambda: operator.bind(**fixed(inputs))):
            with pytest.raises(ValueError, match="the operator is closed; load it again"):
                call()
        assert open_one.bind(**fixed(inputs))(*varying(inputs)) is inputs.kv_cache


def test_threads_may_share_a_step(cpu: runtime.Operator) -> None:
    inputs = make(SMALL, seed=7)
    expected = written(cpu, inputs)
    step = cpu.bind(**fixed(inputs))
    results: list[bool] = []

    def work() -> None:
        for _ in range(5):
            results.append(torch.equal(step(*varying(inputs)), expected))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 40


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_fork_steps_too(cpu: runtime.Operator) -> None:
    inputs = make(SMALL, seed=8, weight_dtype=torch.float32)
    arrays = {name: getattr(inputs, name).numpy().copy() for name in FIXED}
    given = [tensor.numpy() for tensor in varying(inputs)]
    step = cpu.bind(**fixed(inputs, **arrays))
    expected = written(cpu, inputs).numpy()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if np.array_equal(step(*given), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
