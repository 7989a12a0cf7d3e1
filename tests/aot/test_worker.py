"""The worker as the builder starts it: a script in another process, spoken to in JSON lines."""

from __future__ import annotations

import ast
import base64
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
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
        (folder / "scratch").mkdir()
        self.process = subprocess.run(
            [sys.executable, *toolchain.BOOTSTRAP],
            input=toolchain.first_line() + text,
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder / "scratch"), **environ},
        )
        self.answers = [json.loads(line) for line in self.process.stdout.splitlines()]
        # By the place of their request; a failed one has none.
        self.binaries = {
            i: base64.b64decode(answer["binary"]) for i, answer in enumerate(self.answers) if answer["ok"]
        }
        self.left = list((folder / "scratch").iterdir())


def ask(tiny: Any, folder: Path, *units: Unit, environ: Mapping[str, str] | None = None) -> Answers:
    return Answers(folder, [request_for(unit, tiny.sources) for unit in units], environ or {})


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("yes version 1.2", "1.2"), ("echo version 1.2; exit 5", "1.2"), ("sleep 1000", None), ("yes", None),
        ("echo version 1.2; sleep 1000 & echo $! > $0.pid; exit", "1.2"), ("kill -9 $$", None),
    ],
)  # fmt: skip
def test_a_tool_that_floods_hangs_or_leaves_children_is_asked_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: str | None
) -> None:
    monkeypatch.setattr(worker, "TOOL_LIMIT_S", 1)
    tool = tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    asked = {"paths": [str(tool)], "arguments": ["--version"], "pattern": r"version ([0-9.]+)"}
    assert worker.tool_version(str(tool), asked) == found
    if (tmp_path / "tool.pid").exists():
        state = Path(f"/proc/{(tmp_path / 'tool.pid').read_text().strip()}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


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
    tools = toolchain.tools_of("nvidia")
    done = toolchain.run(
        [sys.executable, *toolchain.BOOTSTRAP, "--probe"],
        os.environ,
        toolchain.first_line() + json.dumps(tools) + "\n",
    )
    assert json.loads(done.stdout) == worker.probe(tools)
    assert {"python", "triton", "ptxas", "ptxas-blackwell"} == set(worker.probe(tools))
    assert worker.probe({})["triton"] == metadata.version("triton")


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
    assert {i: elf.read(data).machine for i, data in done.binaries.items()} == {0: 190, 6: 224}
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
        one = first.binaries[i]
        assert one == second.binaries[len(names) - 1 - i], names[i]
        assert str(tmp_path).encode() not in one
        assert b"kvbuild-" not in one


def test_what_the_unit_says_reaches_the_compiler(tiny: Any, tmp_path: Path) -> None:
    plain = tiny.unit()
    fused = replace(plain, options=tuple(sorted({**dict(plain.options), "enable_fp_fusion": True}.items())))
    wide = replace(plain, constexprs=(("BLOCK", 512),))
    aligned = replace(wide, divisible_by_16=("x", "n"))
    done = ask(tiny, tmp_path, plain, fused, wide, aligned)
    assert all(answer["ok"] for answer in done.answers)
    assert len({done.binaries[i] for i in range(4)}) == 4


def test_sm_90_is_assembled_by_the_first_ptxas(tiny: Any, tmp_path: Path) -> None:
    versions = worker.probe(toolchain.tools_of("nvidia"))
    unit = tiny.unit("nvidia:sm_90")
    done = ask(tiny, tmp_path, unit, replace(unit, environment=()))
    assert all(answer["ok"] for answer in done.answers)
    # The second ptxas is of CUDA 13, whose cubins have another ABI version (e_ident[8]) and a release note.
    with_first, with_second = (done.binaries[i] for i in range(2))
    assert (with_first[8], with_second[8]) == (7, 8)
    release = b"release " + ".".join(versions["ptxas-blackwell"].split(".")[:2]).encode()
    assert release not in with_first
    assert release in with_second
    assert nvidia.min_driver(nvidia.toolchain("sm_90", versions)) == 12000


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (b"bytes", b"bytes"),
        (bytearray(b"bytes"), b"bytes"),
        ("{path}", b"in a file"),
        (("asm text\nof a fork", "{path}"), b"in a file"),
        (("{path}", b"bytes"), b"bytes"),
    ],
)
def test_a_binary_is_found_in_whatever_form_a_triton_gives_it(
    given: Any, wanted: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "kernel.mubin"
    path.write_bytes(b"in a file")

    def filled(part: Any) -> Any:
        return part.replace("{path}", str(path)) if isinstance(part, str) else part

    value = tuple(map(filled, given)) if isinstance(given, tuple) else filled(given)
    assert worker.content({"ptx": "text", "mubin": value}, "mubin") == wanted


@pytest.mark.parametrize(
    ("given", "kinds"), [("no\nfile", "str"), (None, "no such stage"), ((1, "x"), "int, str")]
)
def test_a_binary_that_is_none_is_said(given: Any, kinds: str) -> None:
    with pytest.raises(TypeError, match=f"wanted the bytes of stage mubin, found {kinds}; Triton gave ptx"):
        worker.content({"ptx": "text", **({} if given is None else {"mubin": given})}, "mubin")


def test_tools_are_looked_for_where_their_vendor_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk = tmp_path / "sdk with a space"
    (sdk / "bin").mkdir(parents=True)
    for name, script in (
        ("good", "echo 'compiler 4 release' >&2; echo version 3.7.1.5"),
        ("odd", "echo none"),
        ("named", "echo V1.2 3.4"),
    ):
        (sdk / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (sdk / "bin" / name).chmod(0o755)
    monkeypatch.setenv("THE_SDK", str(sdk))
    monkeypatch.delenv("NO_SDK", raising=False)
    monkeypatch.setenv("PATH", f"{sdk / 'bin'}:{os.environ['PATH']}")

    def found(*paths: str, arguments: tuple[str, ...] = ("--version",), **more: str) -> str | None:
        tool = {"paths": paths, "arguments": arguments, "pattern": r"(\d+(?:\.\d+)+)", **more}
        return worker.probe({"it": tool}).get("it")

    assert found("$THE_SDK/bin/good") == "3.7.1.5"
    assert found("$NO_SDK/bin/good") is None
    assert found("$NO_SDK/bin/good", "/absent/good", "$THE_SDK/bin/good") == "3.7.1.5"
    assert found("good") == "3.7.1.5"
    assert found("$THE_SDK/bin/odd") is None
    assert found("$THE_SDK/bin/named", pattern=r"V(\S+)") == "1.2"
    assert found("{triton}/backends/nvidia", arguments=()) == "present"
    assert found("{triton}/backends/nobody", arguments=()) is None
    assert found("$THE_SDK/bin") is None  # a folder does not run


def test_the_current_folder_shadows_nothing(tiny: Any, tmp_path: Path) -> None:
    for name in ("json", "base64", "triton", "tempfile"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    assert ask(tiny, tmp_path, tiny.unit()).answers[0]["ok"]


def test_another_text_under_the_same_path_is_compiled_anew(tiny: Any, tmp_path: Path) -> None:
    unit = tiny.unit()
    other = {**tiny.sources, "tiny/step.py": tiny.sources["tiny/step.py"].replace("3.0", "4.0")}
    texts = [tiny.sources, other, tiny.sources]
    done = Answers(tmp_path, [request_for(unit, text) for text in texts], {})
    assert [answer["ok"] for answer in done.answers] == [True] * 3
    first, changed, again = (done.binaries[i] for i in range(3))
    assert first == again != changed
