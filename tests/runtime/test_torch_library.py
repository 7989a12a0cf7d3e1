"""The operator as one of torch's: its schema, its fake implementation, and calls under torch.compile."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbuild import runtime
from kvbuild.kernels.workloads import Inputs, Workload, make
from kvbuild.runtime import torch_library
from kvbuild.runtime.operator import Operator

SMALL = Workload(2, 1024, 128)


@pytest.fixture(scope="module")
def cpu(cpu_bundle: Path) -> runtime.Operator:
    return runtime.load(cpu_bundle, device="cpu")


@pytest.fixture(scope="module")
def op(cpu: runtime.Operator) -> Any:
    return torch_library.register(cpu)


@pytest.fixture(autouse=True)
def _forget_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def written(operator: runtime.Operator, inputs: Inputs) -> torch.Tensor:
    """kv_cache as the operator itself leaves it."""
    return operator.compress(*inputs.with_(kv_cache=inputs.kv_cache.clone()).call_args())


def test_the_schema_says_what_is_mutated(op: Any) -> None:
    schema = op.default._schema
    mutated = [each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write]
    assert mutated == ["kv_cache"] and schema.returns == []
    names = Operator.compress.__code__.co_varnames[1:13]
    assert tuple(each.name for each in schema.arguments) == names
    assert schema.arguments[-1].default_value == 1.0e-6


def test_an_eager_call_writes_the_same_bytes(cpu: runtime.Operator, op: Any) -> None:
    inputs = make(SMALL, seed=1)
    expected = written(cpu, inputs)
    before = cpu.counters()["calls"]
    assert op(*inputs.call_args()) is None
    assert torch.equal(inputs.kv_cache, expected)
    assert cpu.counters()["calls"] == before + 1
    assert torch.ops.kvbuild.compress is op


@pytest.mark.parametrize("name", ["state_cache", "rms_norm_weight", "kv_cache"])
def test_a_single_meta_tensor_is_refused_and_not_taken_for_a_trace(op: Any, name: str) -> None:
    inputs = make(SMALL, seed=1)
    found = "cpu" if name == "kv_cache" else "meta"
    with pytest.raises(ValueError, match=f"wanted a tensor on .* kv_cache lies, found one on {found}; move"):
        op(*inputs.with_(**{name: getattr(inputs, name).to("meta")}).call_args())
    given = inputs.call_args()
    assert op(*(each.to("meta") for each in given[:9]), *given[9:]) is None


def test_torchs_own_checks_pass(op: Any) -> None:
    found = torch.library.opcheck(op.default, make(SMALL, seed=2).call_args())
    assert set(found.values()) == {"SUCCESS"} and len(found) >= 4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_holds_the_call_in_one_graph(
    cpu: runtime.Operator, op: Any, backend: str
) -> None:
    """The work before and after is traced with it, and the order of reads and writes of kv_cache is kept."""

    def work(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cache = arguments[8]
        before = cache.sum(dtype=torch.int64)
        op(*arguments[:3], arguments[3] + 0, *arguments[4:])
        return before, cache.sum(dtype=torch.int64)

    compiled = torch.compile(work, fullgraph=True, backend=backend)
    for seed in (3, 4):
        inputs = make(SMALL, seed=seed)
        expected = written(cpu, inputs)
        sums = inputs.kv_cache.sum(dtype=torch.int64), expected.sum(dtype=torch.int64)
        assert compiled(*inputs.call_args()) == sums and sums[0] != sums[1]
        assert torch.equal(inputs.kv_cache, expected)


def test_one_graph_serves_any_number_of_outputs(cpu: runtime.Operator, op: Any) -> None:
    graphs: list[Any] = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    compiled = torch.compile(lambda *given: op(*given), fullgraph=True, dynamic=True, backend=backend)
    inputs = make(SMALL, seed=5)
    for outputs in (7, 3, 5):  # not 8, which torch would take for the block size
        few = inputs.with_(boundary_token_indices=inputs.boundary_token_indices[:outputs]).fresh()
        expected = written(cpu, few)
        compiled(*few.call_args())
        assert torch.equal(few.kv_cache, expected)
    assert len(graphs) == 1


def test_an_exported_program_holds_the_call(cpu: runtime.Operator, op: Any) -> None:
    class Step(torch.nn.Module):
        def forward(self, *arguments: Any) -> torch.Tensor:
            op(*arguments, 8, 128)
            return arguments[8] + 1

    inputs = make(SMALL, seed=6)
    program = torch.export.export(Step(), inputs.fresh().call_args()[:9])
    assert any("kvbuild.compress" in str(node.target) for node in program.graph.nodes)
    expected = written(cpu, inputs)
    assert torch.equal(program.module()(*inputs.call_args()[:9]), expected + 1)
    assert torch.equal(inputs.kv_cache, expected)


def test_a_weight_that_requires_a_gradient_is_read_without_a_warning(cpu: runtime.Operator, op: Any) -> None:
    inputs = make(SMALL, seed=7, weight_dtype=torch.float32)
    inputs = inputs.with_(rms_norm_weight=torch.nn.Parameter(inputs.rms_norm_weight))
    expected = written(cpu, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        op(*inputs.call_args())
    assert torch.equal(inputs.kv_cache, expected) and not inputs.kv_cache.requires_grad


def test_errors_are_the_operators(cpu: runtime.Operator, op: Any) -> None:
    inputs = make(SMALL, seed=8)
    with pytest.raises(TypeError, match="^positions: wanted dtype int64, found int32"):
        op(*inputs.with_(positions=inputs.positions.int()).call_args())
    compiled = torch.compile(lambda *given: op(*given), fullgraph=True, backend="eager")
    with pytest.raises(ValueError, match="block_size: wanted 8"):
        compiled(*inputs.call_args()[:9], 4, 128)


def test_operators_are_found_by_device(cpu_bundle: Path, cpu: runtime.Operator) -> None:
    elsewhere = Operator(cpu._launcher, cpu.target, replace(cpu.facts, vendor="nvidia", index=1))
    op = torch_library.register(elsewhere, "kvbuild_test::by_device")
    inputs = make(SMALL, seed=9)
    with pytest.raises(ValueError, match=r"by_device was registered for \(cuda:1\), found one on cpu"):
        op(*inputs.call_args())
    with runtime.load(cpu_bundle, device="cpu") as closed:
        assert torch_library.register(closed, "kvbuild_test::by_device") is op
    with pytest.raises(ValueError, match="the operator is closed"):
        op(*inputs.call_args())
    torch_library.register(cpu, "kvbuild_test::by_device")
    expected = written(cpu, inputs)
    op(*inputs.call_args())
    assert torch.equal(inputs.kv_cache, expected)


@pytest.mark.parametrize("name", ["compress", "a::b::c", "a.b::c", "::c", "a::", 7])
def test_a_name_that_is_none(cpu: runtime.Operator, name: Any) -> None:
    with pytest.raises(ValueError, match='name: wanted "namespace::operator", found'):
        torch_library.register(cpu, name)


@pytest.mark.parametrize(("name", "kept"), [("my::name", "name"), ("load_library::compress", "load_library")])
def test_a_name_that_torch_keeps_to_itself(cpu: runtime.Operator, name: str, kept: str) -> None:
    """torch cannot hold an operator of such a name: an attribute of its own stands in the place."""
    for _ in range(2):
        with pytest.raises(ValueError, match=f"found {name}, of which torch keeps '{kept}' to itself"):
            torch_library.register(cpu, name)
    assert torch._C._jit_get_schemas_for_operator(name) == []
    namespace = name.partition("::")[0]
    if namespace == "my":
        op = torch_library.register(cpu, "my::compress_it")
        assert torch.ops.my.compress_it is op and torch.ops.my.name == "my"


def test_what_cannot_be_registered(cpu: runtime.Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="found that torch.ops has aten::add already"):
        torch_library.register(cpu, "aten::add")
    with pytest.raises(TypeError, match="operator: wanted one that runtime.load returned, found str"):
        torch_library.register("compress.kvb")  # type: ignore[arg-type]
    monkeypatch.delattr(torch.library, "register_fake")
    with pytest.raises(RuntimeError, match=r"wanted torch 2\.4 or later.*found 2"):
        torch_library.register(cpu, "kvbuild_test::old_torch")


def test_the_runtime_does_not_import_it() -> None:
    code = "import torch, sys, kvbuild.runtime; print('kvbuild.runtime.torch_library' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
