"""The benchmark's flow with the GPU replaced: who is timed, who is not and why, whose bytes are judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbuild import runtime
from kvbuild.aot.measure import ceiling, hostcost, timing, versus
from kvbuild.aot.measure.timing import Timing
from kvbuild.aot.measure.versus import COMPILED, EAGER, JIT, OURS, REPLAYED, WHOLE_WINDOW, Effort, Versus
from kvbuild.kernels import reference
from kvbuild.kernels.workloads import Workload

SMALL = Workload.decode(3, 128, 0)


class Gpu:
    """A GPU, as far as Place goes, whose tensors are the host's."""

    device = torch.device("cpu")
    is_gpu = True
    name = "stand-in"

    def synchronize(self) -> None:
        pass


@pytest.fixture
def made(cpu_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Versus:
    """Graphs are lists of the calls in them; a call takes as many microseconds as the graph has calls."""

    def replay(graph: int, calls: int, replays: int, warm_up: int = 0) -> Timing:
        assert graph == 1
        return Timing.of([float(calls)] * replays)

    monkeypatch.setattr(timing, "capture", lambda body: body() or 1)
    monkeypatch.setattr(timing, "replay", replay)
    monkeypatch.setattr(ceiling, "reader", lambda: (None, "none"))
    monkeypatch.setattr(ceiling, "best", lambda *_: (Timing.of([2.0]), "torch.sum"))
    monkeypatch.setattr(versus, "COLD_BYTES", 4 * SMALL.window_bytes)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(versus, "_need_triton", lambda: triton())
    operator = runtime.load(cpu_bundle, device="cpu")
    tile = SimpleNamespace(to_json=lambda: dict(block_t=8, block_d=512, split=1, num_warps=4, num_stages=1))
    variant = SimpleNamespace(ratio=128, layout="aligned", max_outputs=None, kernels=["k"])
    target = SimpleNamespace(kernels=[SimpleNamespace(name="k", tile=tile)])
    fake = SimpleNamespace(compress=operator.compress, variants=(variant,), target=target, bind=operator.bind)
    return Versus(fake, Gpu(), Effort(quick=True, calls=8), lambda text: None)  # type: ignore[arg-type]


def triton() -> Any:
    def call(inputs: Any, *_: object) -> Callable[[], object]:
        return lambda: reference.compress(*inputs.call_args())

    return SimpleNamespace(WHOLE_WINDOW_SHAPES=((64, 4), (32, 8)), whole_window=call, same_kernels=call)


def test_every_caller_is_timed_and_its_bytes_are_looked_at(made: Versus) -> None:
    row = made.row(SMALL).to_json()
    assert set(row["callers"]) == {OURS, EAGER, REPLAYED, COMPILED, JIT, WHOLE_WINDOW}
    assert row["not_measured"] == {}
    assert {each["wrong_bytes"] for each in row["callers"].values()} == {0}
    # 4 inputs: graphs hold them twice, and the slow ones once.
    assert (row["sets"], row["callers"][OURS]["median"], row["callers"][REPLAYED]["median"]) == (4, 8.0, 4.0)
    assert row["callers"][OURS]["of_ceiling"] == 0.25
    assert row["callers"][REPLAYED]["times_kvbuild"] == 0.5
    assert row["callers"][WHOLE_WINDOW]["note"] == "[128, 64] tiles, 4 warps"


def test_what_cannot_be_measured_says_why(made: Versus, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise versus.Unavailable("Triton is not installed here")

    def broken(*_: object) -> None:
        raise RuntimeError("cannot be captured\nmore words")

    monkeypatch.setattr(versus, "_need_triton", absent)
    monkeypatch.setattr(reference, "compress_plain", broken)
    row = made.row(SMALL).to_json()
    assert set(row["callers"]) == {OURS, EAGER}
    assert row["not_measured"][JIT] == row["not_measured"][WHOLE_WINDOW] == "Triton is not installed here"
    assert row["not_measured"][REPLAYED] == "RuntimeError: cannot be captured"


def test_a_kernel_that_this_triton_cannot_compile_is_replaced_by_the_plain_one(
    made: Versus, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []

    def same_kernels(inputs: Any, tile: Any) -> Callable[[], object]:
        def call() -> object:
            compiled.append(tile)
            if tile.form == "stream":
                raise RuntimeError("no Gluon of this kind\nmore words")
            return reference.compress(*inputs.call_args())

        return call

    monkeypatch.setattr(
        versus, "_need_triton", lambda: SimpleNamespace(**{**vars(triton()), "same_kernels": same_kernels})
    )
    found = made.row(SMALL).to_json()["callers"][JIT]
    assert found["wrong_bytes"] == 0
    assert found["note"].startswith("the plain kernel t4d512s1w4n2, for ")
    assert found["note"].endswith("RuntimeError: no Gluon of this kind")
    assert [tile.form for tile in compiled].count("stream") == 1, "tried once, not for each workload"


def test_torch_compile_has_a_budget(made: Versus) -> None:
    made._compiling = made.effort.compile_seconds + 1
    assert "has taken 151 s already" in made.row(SMALL).reasons[COMPILED]


def test_a_wrong_byte_is_counted_and_a_failure_of_ours_is_raised(made: Versus) -> None:
    real = made.operator.compress

    def spoiled(*arguments: Any) -> Any:
        result = real(*arguments)
        arguments[8][0, :] ^= 1
        return result

    made.operator.compress = spoiled
    row = made.row(SMALL)
    assert row.wrong[OURS] > 500 and row.wrong[EAGER] == 0
    made.operator.compress = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        made.row(SMALL)


def test_host_costs_by_caller(made: Versus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostcost, "bare_us", lambda *_: 1.5)
    monkeypatch.setattr(hostcost, "_registered", lambda operator: lambda *_: None)
    found = hostcost.measure(made, lambda name: b"")
    ours = {OURS, hostcost.BOUND, hostcost.OPS}
    assert set(found["callers"]) == ours | {EAGER, JIT, hostcost.ADD, hostcost.BARE}
    assert found["callers"][hostcost.BARE] == {"batch": 1.5} and found["outputs"] == 8
    assert all(each["batch"] > 0 for each in found["callers"].values())

    def refuse(*_: object) -> float:
        raise RuntimeError("cuLaunchKernelEx: error 1")

    monkeypatch.setattr(hostcost, "bare_us", refuse)
    del made.operator.bind
    found = hostcost.measure(made, lambda name: b"")
    assert found["not_measured"] == {
        hostcost.BOUND: "this operator has no bind", hostcost.BARE: "cuLaunchKernelEx: error 1",
    }  # fmt: skip
