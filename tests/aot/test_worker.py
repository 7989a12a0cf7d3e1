"""The worker as the builder starts it: a script in another process, spoken to in JSON lines."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbuild.aot import elf, toolchain, worker
from kvbuild.aot.plan import Unit
from kvbuild.aot.pool import request_for
from kvbuild.aot.targets import nvidia


class Answers:
    """What one worker process did with some requests."""

    def __init__(self, folder: Path, requests: list[dict[str, Any]], environ: Mapping[str, str]) -> None:
        text = "".join(json.dumps(request) + "\n" for request in requests)
        script = folder / "worker.py"
        script.write_bytes(toolchain.WORKER.read_bytes())
        (folder / "scratch").mkdir()
        self.process = subprocess.run(
            [sys.executable, str(script)],
            input=text,
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder / "scratch"), **environ},
        )
        self.answers = [json.loads(line) for line in self.process.stdout.splitlines()]
        self.left = list((folder / "scratch").iterdir())


def ask(tiny: Any, folder: Path, *units: Unit, environ: Mapping[str, str] | None = None) -> Answers:
    requests = [request_for(unit, tiny.sources, str(folder / f"{i}.bin")) for i, unit in enumerate(units)]
    return Answers(folder, requests, environ or {})


def test_it_stands_alone_and_runs_under_python_3_8() -> None:
    tree = ast.parse(toolchain.WORKER.read_text(), feature_version=(3, 8))
    imported = {
        (name.name if isinstance(node, ast.Import) else str(node.module)).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert imported - set(sys.stdlib_module_names) == {"triton"}


def test_the_probe_prints_versions() -> None:
    done = subprocess.run([sys.executable, str(toolchain.WORKER), "--probe"], capture_output=True, text=True)
    assert json.loads(done.stdout) == worker.probe()
    assert {"python", "triton", "ptxas"} <= set(worker.probe())


def test_requests_are_answered_in_order_and_failures_do_not_end_it(tiny: Any, tmp_path: Path) -> None:
    noisy = (
        "import os\nprint('to stdout')\nos.write(1, b'{\"id\": \"forged\"}\\n')\n"
        + tiny.sources["tiny/add.py"]
    )
    units = [
        tiny.unit(module=tiny.source("noisy", noisy)),
        tiny.unit(module=tiny.source("broken", "def add(:\n")),
        tiny.unit(
            module=tiny.source("wrong", tiny.sources["tiny/add.py"].replace("v * scale", "no_such_name"))
        ),
        tiny.unit(function="absent"),
        tiny.unit(signature=(("x", "*fp32"),)),
        tiny.unit(toolchain=(("triton", "1.0"),)),
        tiny.unit("amd:gfx942"),
    ]
    done = ask(tiny, tmp_path, *units)
    assert done.process.returncode == 0
    assert [answer["id"] for answer in done.answers] == [unit.key for unit in units]
    first, broken, wrong, absent, shape, version, last = done.answers
    assert first["ok"] and last["ok"]
    assert (first["entry"], first["num_warps"], first["num_ctas"]) == ("add", 4, 1)
    assert (first["global_scratch"], first["profile_scratch"]) == (0, 0)
    assert broken["kind"] == "SyntaxError"
    assert wrong["kind"] == "CompilationError" and "no_such_name" in wrong["error"]
    assert absent["kind"] == "AttributeError" and "absent" in absent["error"]
    assert "add takes (x, n, count, scale, BLOCK), the plan gives (x, BLOCK)" in shape["error"]
    assert "wanted triton 1.0 as planned, found" in version["error"]
    assert sorted(path.name for path in tmp_path.glob("*.bin*")) == ["0.bin", "6.bin"]
    assert elf.read((tmp_path / "0.bin").read_bytes()).machine == 190
    assert elf.read((tmp_path / "6.bin").read_bytes()).machine == 224
    assert done.left == []


def test_the_bytes_depend_neither_on_the_folder_nor_on_what_was_compiled_before(
    tiny: Any, tmp_path: Path
) -> None:
    folders = [tmp_path / "a", tmp_path / "another-folder" / "b"]
    for folder in folders:
        folder.mkdir(parents=True)
    # The sm_90 unit swaps the assembler for itself alone; between two sm_100 units it must not stay.
    names = ["nvidia:sm_80", "nvidia:sm_90", "amd:gfx942", "nvidia:sm_100"]
    first = ask(tiny, folders[0], *(tiny.unit(name) for name in names))
    second = ask(
        tiny, folders[1], *(tiny.unit(name) for name in reversed(names)), environ={"PYTHONHASHSEED": "7"}
    )
    assert all(answer["ok"] for answer in (*first.answers, *second.answers))
    for i in range(len(names)):
        one = (folders[0] / f"{i}.bin").read_bytes()
        assert one == (folders[1] / f"{len(names) - 1 - i}.bin").read_bytes(), names[i]
        assert str(tmp_path).encode() not in one
        assert b"kvbuild-" not in one


def test_what_the_unit_says_reaches_the_compiler(tiny: Any, tmp_path: Path) -> None:
    plain = tiny.unit()
    fused = replace(plain, options=tuple(sorted({**dict(plain.options), "enable_fp_fusion": True}.items())))
    wide = replace(plain, constexprs=(("BLOCK", 512),))
    aligned = replace(wide, divisible_by_16=("x", "n"))
    done = ask(tiny, tmp_path, plain, fused, wide, aligned)
    assert all(answer["ok"] for answer in done.answers)
    assert len({(tmp_path / f"{i}.bin").read_bytes() for i in range(4)}) == 4


def test_sm_90_is_assembled_by_the_first_ptxas(tiny: Any, tmp_path: Path) -> None:
    versions = worker.probe()
    unit = tiny.unit("nvidia:sm_90")
    done = ask(tiny, tmp_path, unit, replace(unit, environment=()))
    assert all(answer["ok"] for answer in done.answers)
    # The second ptxas is of CUDA 13, whose cubins have another ABI version (e_ident[8]) and a release note.
    with_first, with_second = ((tmp_path / f"{i}.bin").read_bytes() for i in range(2))
    assert (with_first[8], with_second[8]) == (7, 8)
    release = b"release " + ".".join(versions["ptxas-blackwell"].split(".")[:2]).encode()
    assert release not in with_first
    assert release in with_second
    assert nvidia.min_driver(nvidia.toolchain("sm_90", versions)) == 12000


def test_an_artifact_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    target = tmp_path / "x.bin"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            worker.publish(b"data", str(target))
    assert not target.exists()
    worker.publish(b"data", str(target))
    assert target.read_bytes() == b"data"


def test_another_text_under_the_same_path_is_compiled_anew(tiny: Any, tmp_path: Path) -> None:
    unit = tiny.unit()
    other = {**tiny.sources, "tiny/step.py": tiny.sources["tiny/step.py"].replace("3.0", "4.0")}
    texts = [tiny.sources, other, tiny.sources]
    requests = [request_for(unit, text, str(tmp_path / f"{i}.bin")) for i, text in enumerate(texts)]
    done = Answers(tmp_path, requests, {})
    assert [answer["ok"] for answer in done.answers] == [True] * 3
    first, changed, again = ((tmp_path / f"{i}.bin").read_bytes() for i in range(3))
    assert first == again != changed
