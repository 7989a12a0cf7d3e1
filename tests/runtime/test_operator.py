"""Loading and calling: a stand-in launcher for the errors, this machine's cpu target for the bytes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbuild import runtime
from kvbuild.kernels.oracle import expect
from kvbuild.kernels.verdict import judge
from kvbuild.kernels.workloads import Workload, make
from kvbuild.runtime import operator as module
from kvbuild.runtime.device import cpu_facts

Build = Callable[..., bytes]

SMALL = Workload(2, 1024, 128)


def blank(**changes: Any) -> list[Any]:
    """Arguments that the stand-in accepts."""
    values: dict[str, Any] = {f"operand {number}": np.zeros(1) for number in range(8)}
    values |= {"kv_cache": np.zeros(8, np.uint8), "block_size": 8, "compress_ratio": 128}
    return list({**values, **changes}.values())


@pytest.fixture
def stand_in(stand_in_bundle: Path) -> Iterator[runtime.Operator]:
    with runtime.load(stand_in_bundle, device="cpu") as operator:
        yield operator


@pytest.fixture(scope="module")
def cpu(cpu_bundle: Path, way: str) -> runtime.Operator:
    return runtime.load(cpu_bundle, device="cpu")


def gpu_bundle(samples: Any, launcher: bytes, path: Path) -> Path:
    """A bundle whose NVIDIA target is served by the stand-in."""
    blobs = samples.blobs(launcher, b"a device binary")
    name, binary = blobs
    aligned = samples.kernel(binary, name="fused-c128-aligned", layout="aligned")
    few = samples.variant(layout="aligned", kernels=["fused-c128-aligned"], max_outputs=8)
    target = samples.target(
        "nvidia",
        "sm_90",
        name,
        kernels=[aligned, samples.kernel(binary)],
        variants=[few, samples.variant()],
    )
    return samples.write(path, samples.manifest([target], blobs), blobs)


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this host one with an H200 of that index."""

    def pretend(index: int) -> None:
        facts = replace(cpu_facts(), vendor="nvidia", arch="sm_90", name="NVIDIA H200", index=index)
        monkeypatch.setattr(module, "detect", lambda _: facts)

    return pretend


def test_a_call_writes_in_place_and_returns_kv_cache(stand_in: runtime.Operator) -> None:
    arguments = blank()
    before = stand_in.counters()["calls"]
    assert stand_in.compress(*arguments) is arguments[8]
    assert arguments[8][0] == 42
    assert stand_in.counters()["calls"] == before + 1
    fresh = stand_in.c128_256_512_compress(*blank())
    assert fresh.tolist() == [42] + [0] * 7


def test_it_says_what_it_is(stand_in: runtime.Operator, samples: Any) -> None:
    assert stand_in.device == "cpu" and stand_in.target.name == f"cpu:{samples.machine}"
    assert stand_in.variants == () and stand_in.facts == cpu_facts()
    assert repr(stand_in) == f"<kvbuild operator cpu:{samples.machine} on cpu>"


def test_keyword_arguments_work(stand_in: runtime.Operator) -> None:
    names = module.Operator.compress.__code__.co_varnames[1:13]
    assert stand_in.compress(**dict(zip(names, [*blank(), 1.0e-6], strict=True)))[0] == 42


@pytest.mark.parametrize(
    ("block_size", "kind", "text"),
    [
        (-1, runtime.DeviceError, "CUDA_ERROR_LAUNCH_FAILED: words"),
        (-2, ValueError, "block_size: wanted 8, found -2"),
        (-3, RuntimeError, "something else"),
        (8.0, TypeError, "block_size: wanted an integer, found float"),
    ],
)
def test_the_launchers_errors_arrive(
    stand_in: runtime.Operator, block_size: Any, kind: type[Exception], text: str
) -> None:
    for call in (stand_in.compress, stand_in.c128_256_512_compress):
        with pytest.raises(kind) as error:
            call(*blank(block_size=block_size))
        assert type(error.value) is kind and str(error.value) == text
        assert error.value.__cause__ is None


def test_a_closed_operator_says_so(stand_in_bundle: Path) -> None:
    with runtime.load(stand_in_bundle, device="cpu") as operator:
        pass
    operator.close()
    assert repr(operator).endswith("on cpu, closed>")
    for call in (lambda: operator.compress(*blank()), operator.counters):
        with pytest.raises(ValueError, match="the operator is closed; load it again"):
            call()


def opens(operator: runtime.Operator) -> int:
    """How many operators the stand-in has open on the device."""
    return operator._launcher.counters(0)[1]


def test_operators_share_a_launcher_and_close_on_their_own(stand_in_bundle: Path) -> None:
    first, second = (runtime.load(stand_in_bundle, device="cpu") for _ in range(2))
    before = opens(second)
    first.close()
    first.close()
    assert opens(second) == before - 1
    assert second.compress(*blank())[0] == 42
    second.close()


def test_a_dropped_operator_keeps_its_code_for_captured_graphs(stand_in_bundle: Path) -> None:
    with runtime.load(stand_in_bundle, device="cpu") as operator:
        before = opens(operator)
        runtime.load(stand_in_bundle, device="cpu")
        gc.collect()
        assert opens(operator) == before + 1


def test_the_variable_names_the_bundle(stand_in_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBUILD_BUNDLE", str(stand_in_bundle))
    with runtime.load(device="cpu") as operator:
        assert operator.compress(*blank())[0] == 42


@pytest.mark.parametrize("keys", [[], ["key"], ["a", "b"]], ids=len)
def test_trusted_keys_refuse_what_no_one_signed(stand_in_bundle: Path, keys: list[str]) -> None:
    with pytest.raises(runtime.BundleError, match=f"unsigned: wanted .* one of {len(keys)} trusted keys"):
        runtime.load(stand_in_bundle, device="cpu", trusted_keys=keys)


@pytest.mark.parametrize("keys", [5, "key", b"key", object(), iter([])], ids=lambda keys: type(keys).__name__)
def test_trusted_keys_that_are_no_list_are_a_type_error(stand_in_bundle: Path, keys: Any) -> None:
    with pytest.raises(TypeError, match="trusted_keys: wanted a list of keys"):
        runtime.load(stand_in_bundle, device="cpu", trusted_keys=keys)


def test_a_subinterpreter_is_refused_before_it_crashes(stand_in_bundle: Path) -> None:
    load = f"from kvbuild import runtime; runtime.load({str(stand_in_bundle)!r})"
    code = (
        "try: import _interpreters as interpreters\n"
        "except ImportError: import _xxsubinterpreters as interpreters\n"
        f"print(interpreters.run_string(interpreters.create(), {load!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode in (0, 1)
    assert (
        "wanted the process's main interpreter, found sub" in said
        or "does not support loading in sub" in said
    )


@pytest.mark.parametrize("strict", ["no", 1, None])
def test_strict_is_true_or_false(stand_in_bundle: Path, strict: Any) -> None:
    with pytest.raises(TypeError, match=f"strict: wanted True or False, found {strict!r}"):
        runtime.load(stand_in_bundle, device="cpu", strict=strict)


def test_no_artifact_for_the_device(stand_in_bundle: Path, as_gpu: Callable[[int], None]) -> None:
    as_gpu(0)
    with pytest.raises(runtime.NoMatchingArtifact) as error:
        runtime.load(stand_in_bundle)
    assert str(error.value).startswith(f"{stand_in_bundle}: no target of this bundle fits nvidia:sm_90")
    assert "its vendor is cpu, this device's is nvidia" in str(error.value)


def test_wrong_devices_are_named(stand_in_bundle: Path) -> None:
    with pytest.raises(ValueError, match="device: wanted"):
        runtime.load(stand_in_bundle, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(runtime.DeviceError, match="wanted device"):
            runtime.load(stand_in_bundle, device="cuda:99")


def test_blobs_are_checked_before_use_every_time(
    samples: Any, stand_in_launcher: Build, tmp_path: Path
) -> None:
    launcher = stand_in_launcher()
    blobs = samples.blobs(launcher, b"another launcher", b"a device binary")
    name, other, binary = blobs
    mine = samples.target("cpu", samples.machine, name)
    path = tmp_path / "two.kvb"
    targets = [mine, samples.target("nvidia", "sm_90", other, binary)]
    samples.write(path, samples.manifest(targets, blobs), blobs)
    data = path.read_bytes()
    runtime.load(path, device="cpu").close()

    path.write_bytes(data.replace(b"a device binary", b"A device binary"))
    runtime.load(path, device="cpu").close()

    path.write_bytes(data.replace(b"an operand is no tensor", b"an operand is No tensor"))
    with pytest.raises(runtime.BundleError, match=f"entry {name}: wanted content of that sha256"):
        runtime.load(path, device="cpu")


def test_what_the_launcher_refuses_names_the_bundle(
    samples: Any, stand_in_launcher: Build, tmp_path: Path, as_gpu: Callable[[int], None]
) -> None:
    path = gpu_bundle(samples, stand_in_launcher(counters=4), tmp_path / "gpu.kvb")
    as_gpu(8)
    with pytest.raises(runtime.BundleError, match=f"^{path}: entry .* wanted another launch table"):
        runtime.load(path)
    as_gpu(9)
    with pytest.raises(runtime.DeviceError, match="CUDA_ERROR_NO_DEVICE: nothing there"):
        runtime.load(path)


class OnDevice:
    """A tensor as far as its device is concerned."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.index

    def __dlpack__(self, **_: Any) -> Any:
        return np.zeros(8, np.uint8).__dlpack__()


def test_an_operator_serves_its_own_device(
    samples: Any, stand_in_launcher: Build, tmp_path: Path, as_gpu: Callable[[int], None]
) -> None:
    path = gpu_bundle(samples, stand_in_launcher(counters=4), tmp_path / "gpu.kvb")
    operators = []
    for index in (0, 3):
        as_gpu(index)
        operators.append(runtime.load(path))
    assert [operator.device for operator in operators] == ["cuda:0", "cuda:3"]
    for operator, own, other in zip(operators, (0, 3), (3, 0), strict=True):
        operator.compress(*blank(kv_cache=OnDevice(own)))
        with pytest.raises(ValueError, match=f"kv_cache: wanted a tensor on cuda:{own}.*on device {other}"):
            operator.compress(*blank(kv_cache=OnDevice(other)))
        operator.close()


def test_counters_name_the_variants(
    samples: Any, stand_in_launcher: Build, tmp_path: Path, as_gpu: Callable[[int], None]
) -> None:
    as_gpu(0)
    with runtime.load(gpu_bundle(samples, stand_in_launcher(counters=4), tmp_path / "gpu.kvb")) as operator:
        counters = operator.counters()
    assert counters["launches"] == {"c128-aligned-8": 5, "c128-general-any": 6}
    assert set(counters) == {"calls", "general_calls", "launches"}


# From here on the true cpu target computes.


def test_every_byte_is_right(cpu: runtime.Operator) -> None:
    inputs = make(SMALL, seed=1, page_pad=16)
    oracle = expect(*inputs.call_args())
    before = inputs.kv_cache.clone()
    fresh = cpu.c128_256_512_compress(*inputs.call_args())
    assert torch.equal(inputs.kv_cache, before)
    verdict = judge(fresh, torch.zeros_like(before), oracle)
    assert verdict.right and verdict.outputs == SMALL.num_outputs, str(verdict)
    assert fresh.is_contiguous() and fresh.data_ptr() != inputs.kv_cache.data_ptr()
    assert cpu.compress(*inputs.call_args()) is inputs.kv_cache
    assert judge(inputs.kv_cache, before, oracle).right


def test_no_outputs_give_all_zeros(cpu: runtime.Operator) -> None:
    inputs = make(SMALL, seed=1)
    inputs = inputs.with_(boundary_token_indices=inputs.boundary_token_indices[:0])
    assert not cpu.c128_256_512_compress(*inputs.call_args()).any()


def test_numpy_arrays_give_the_bytes_of_torch_tensors(cpu: runtime.Operator) -> None:
    inputs = make(SMALL, seed=2, weight_dtype=torch.float32)
    arrays = [value.numpy() if isinstance(value, torch.Tensor) else value for value in inputs.call_args()]
    wanted = cpu.c128_256_512_compress(*inputs.call_args())
    found = cpu.c128_256_512_compress(*arrays)
    assert isinstance(found, np.ndarray) and np.array_equal(found, wanted.numpy())


def test_a_weight_that_requires_a_gradient_is_read_like_any_other(cpu: runtime.Operator) -> None:
    inputs = make(SMALL, seed=3, weight_dtype=torch.float32)
    wanted = cpu.c128_256_512_compress(*inputs.call_args())
    parameter = torch.nn.Parameter(inputs.rms_norm_weight.clone())
    found = cpu.c128_256_512_compress(*inputs.with_(rms_norm_weight=parameter).call_args())
    assert torch.equal(found, wanted) and not found.requires_grad


def read_only(tensor: torch.Tensor) -> np.ndarray:
    array = tensor.numpy().copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("name", "change", "kind"),
    [
        ("state_cache", lambda t: t.double(), TypeError),
        ("state_cache", lambda t: t[0], ValueError),
        ("state_cache", lambda t: t.tolist(), TypeError),
        ("token_to_req", lambda t: t.long(), TypeError),
        ("positions", lambda t: t.repeat_interleave(2)[::2], ValueError),
        ("boundary_token_indices", lambda t: None, TypeError),
        ("block_table", lambda t: t.to("meta"), ValueError),
        ("rms_norm_weight", lambda t: t[:100], ValueError),
        ("cos_sin_cache", lambda t: read_only(t), ValueError),
        ("kv_slot_mapping", lambda t: t.to_sparse(), ValueError),
        ("kv_cache", lambda t: t[:, :100], ValueError),
        ("kv_cache", lambda t: t.to("meta"), ValueError),
        ("kv_cache", lambda t: t.short(), TypeError),
    ],
)
def test_a_wrong_argument_is_named(
    cpu: runtime.Operator, name: str, change: Any, kind: type[Exception]
) -> None:
    inputs = make(SMALL, seed=4)
    wrong = inputs.with_(**{name: change(getattr(inputs, name))})
    before = inputs.kv_cache.clone()
    for call in (cpu.compress, cpu.c128_256_512_compress):
        with pytest.raises(kind, match="wanted") as error:
            call(*wrong.call_args())
        assert type(error.value) is kind and str(error.value).startswith(name)
    assert torch.equal(inputs.kv_cache, before)


def test_threads_may_share_an_operator(cpu: runtime.Operator) -> None:
    inputs = make(SMALL, seed=5)
    wanted = cpu.c128_256_512_compress(*inputs.call_args())
    results: list[bool] = []

    def work() -> None:
        for _ in range(5):
            results.append(torch.equal(cpu.c128_256_512_compress(*inputs.call_args()), wanted))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 40


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_fork_computes_too(cpu: runtime.Operator, cpu_bundle: Path) -> None:
    inputs = make(SMALL, seed=6, weight_dtype=torch.float32)
    arrays = [value.numpy() if isinstance(value, torch.Tensor) else value for value in inputs.call_args()]
    wanted = cpu.c128_256_512_compress(*arrays)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        same = np.array_equal(cpu.c128_256_512_compress(*arrays), wanted)
        again = runtime.load(cpu_bundle, device="cpu")
        os._exit(0 if same and np.array_equal(again.c128_256_512_compress(*arrays), wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_wrong_setting_of_the_host_kernel_is_a_value_error(
    cpu_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runtime.load(cpu_bundle, device="cpu") as operator:
        monkeypatch.setenv("KVBUILD_NUM_THREADS", "many")
        with pytest.raises(ValueError, match="^KVBUILD_NUM_THREADS: wanted .*found 'many'"):
            operator.compress(*make(SMALL, device="cpu", seed=0).call_args())
