"""The README tells the truth: its code runs, and its commands, options and variables exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from kvbuild import runtime
from kvbuild.aot.cli.frame import COMMANDS
from kvbuild.kernels import contract
from kvbuild.kernels.workloads import Workload, make
from kvbuild.runtime.bound import VARYING
from kvbuild.runtime.identity import Marks
from kvbuild.runtime.vendors import APIS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPERATOR = (ROOT / "docs" / "operator.md").read_text(encoding="utf-8")


def run_the_example(page: str, bundle: Path, folder: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shutil.copy(bundle, folder / "kvcompress.kvb")
    (folder / "example.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_quickstart_runs(cpu_bundle: Path, tmp_path: Path) -> None:
    assert run_the_example(README, cpu_bundle, tmp_path) == "torch.Size([7, 64]) torch.Size([64])\n"


def test_the_serving_loop_runs(cpu_bundle: Path) -> None:
    """The fragments, in an environment that has what they name; torch.compile without a C++ compiler."""
    inputs = make(Workload(1, 1024, 128), seed=1)
    expected = inputs.fresh()
    with runtime.load(cpu_bundle, device="cpu") as operator:
        operator.compress(*expected.call_args())
        bind, compiled = re.findall(r"```py\n(.*?)```", README, re.DOTALL)
        names = {operand.name: getattr(inputs, operand.name) for operand in contract.OPERANDS}
        names |= {"op": operator, "torch": torch, "steps": [[names[name] for name in VARYING]]}
        exec(bind, names)
        assert torch.equal(inputs.kv_storage, expected.kv_storage)
        inputs = make(Workload(1, 1024, 128), seed=1)
        exec(compiled.replace("fullgraph=True", 'fullgraph=True, backend="eager"'), names)
        names["forward"](*inputs.call_args())
        assert torch.equal(inputs.kv_storage, expected.kv_storage)


def test_the_operator_page_predicts_every_byte(cpu_bundle: Path, tmp_path: Path) -> None:
    assert run_the_example(OPERATOR, cpu_bundle, tmp_path) == "0 bytes differ\n"


def test_the_operand_tables_are_the_contract() -> None:
    for operand in contract.OPERANDS:
        start = f"| `{operand.name}` | {' or '.join(operand.dtypes)} | `[{', '.join(operand.shape[:-1])}"
        for page in (README, OPERATOR):
            assert page.count(f"\n{start}") == 1, operand.name


def test_the_marks_are_those_that_facts_have() -> None:
    listed = README[README.index("| mark | is |") :].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", listed, re.MULTILINE) == [each.name for each in fields(Marks)]
    (apis,) = re.findall(r"^\| `api` \| .*$", listed, re.MULTILINE)
    assert re.findall(r"`(\w+)`", apis)[1:] == list(APIS)


def test_every_command_is_there_and_no_other() -> None:
    used = set(re.findall(r"^\$ kvbuild ([a-z]+)", README, re.MULTILINE))
    assert used == set(COMMANDS)


def test_every_option_is_one(kvbuild: Callable[..., Any]) -> None:
    known = "".join(kvbuild(name, "--help").out for name in COMMANDS) + "--no-deps"
    for option in sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))):
        assert option in known, option


def test_every_variable_is_read_somewhere() -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for package in ("aot", "kernels", "runtime")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".c", ".h")
    ]
    code = "\n".join(sources)
    for name in sorted(set(re.findall(r"\bKVBUILD_[A-Z_]+\b", README))):
        stem = re.sub(r"^(KVBUILD_TOOLCHAIN_).*", r"\1", name)  # the rest is a vendor's name
        assert stem in code, name


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert "://" in target or (ROOT / target).exists(), target
    for path in re.findall(r"`((?:aot|kernels|runtime|docs|tests|benchmarks)/[^` ]+)`", README):
        assert (ROOT / path).exists(), path


def test_no_shown_command_failed() -> None:
    shown = "\n".join(re.findall(r"```console\n(.*?)```", README, re.DOTALL))
    for words in ("kvbuild: ", "Traceback", "failed"):
        assert words not in shown
