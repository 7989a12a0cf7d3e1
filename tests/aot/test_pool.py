from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvbuild.aot import toolchain
from kvbuild.aot.pool import Compiled, Failed, Pool, checked_answer


def pid_source(tiny: Any, name: str, pid_file: Path, then: str) -> str:
    head = f"import os, time\nopen({str(pid_file)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
    return str(tiny.source(name, head + then + "\n" + tiny.sources["tiny/add.py"]))


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_worker_imports_triton_once_for_all_its_units(tiny: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    units = [tiny.unit(module=pid_source(tiny, f"unit{i}", pids, "")) for i in range(3)]
    outcomes = tiny.compile(*units, jobs=1)
    assert all(isinstance(outcome, Compiled) for outcome in outcomes)
    assert len(set(pids.read_text().split())) == 1


def test_the_number_of_workers_changes_no_byte(tiny: Any) -> None:
    units = [tiny.unit(name) for name in ("nvidia:sm_80", "amd:gfx942", "nvidia:sm_86", "amd:gfx1100")]
    alone = tiny.compile(*units, jobs=1)
    together = tiny.compile(*reversed(units), jobs=3)
    assert [each.data for each in alone] == [each.data for each in reversed(together)]


def test_no_worker_is_started_without_units(tiny: Any) -> None:
    assert list(Pool({}, {}, 2, {}).run([])) == []


def test_a_killed_worker_fails_its_unit_and_the_others_go_on(tiny: Any) -> None:
    killed = tiny.source(
        "killed", "import os, signal\nos.write(2, b'last words')\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    leaves = tiny.source("leaves", "import os\nos._exit(7)\n")
    outcomes = tiny.compile(
        tiny.unit(),
        tiny.unit(module=killed),
        tiny.unit("nvidia:sm_86"),
        tiny.unit(module=leaves),
        tiny.unit("amd:gfx942"),
    )
    assert [type(outcome) for outcome in outcomes] == [Compiled, Failed, Compiled, Failed, Compiled]
    assert "was killed by SIGKILL" in outcomes[1].error
    assert "ended with exit code 7" in outcomes[3].error


def test_a_unit_that_never_ends_is_stopped(tiny: Any, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    (outcome,) = Pool({"nvidia": (sys.executable, "-c", code)}, tiny.sources, 1, os.environ, 3.0).run(
        [tiny.unit()]
    )
    assert isinstance(outcome, Failed)
    assert "no answer within 3 s" in outcome.error
    assert gone(int(pid.read_text()))


def test_an_interpreter_that_does_not_start_fails_each_unit(tiny: Any) -> None:
    pool = Pool({"nvidia": ("/no/such/python",)}, tiny.sources, 2, os.environ)
    outcomes = list(pool.run([tiny.unit(), tiny.unit("nvidia:sm_86")]))
    assert all(isinstance(outcome, Failed) and "/no/such/python" in outcome.error for outcome in outcomes)


def test_what_an_interpreter_said_before_it_ended_is_shown(tiny: Any) -> None:
    command = (sys.executable, "-c", "import sys; sys.exit('no licence')")
    (outcome,) = Pool({"nvidia": command}, tiny.sources, 1, os.environ).run([tiny.unit()])
    assert isinstance(outcome, Failed)
    assert "ended with exit code 1; it said:\nno licence" in outcome.error


def test_leaving_early_kills_the_workers_and_removes_their_files(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    pids = tmp_path / "pids"
    stuck = tiny.unit("nvidia:sm_86", module=pid_source(tiny, "stuck", pids, "time.sleep(1000)"))
    outcomes = Pool(tiny.plan().commands, tiny.sources, 2, os.environ).run([tiny.unit(), stuck])
    assert isinstance(next(outcomes), Compiled)
    while not pids.exists() or not pids.read_text():
        time.sleep(0.05)
    outcomes.close()
    assert gone(int(pids.read_text()))
    assert list((tmp_path / "scratch").iterdir()) == []


def test_workers_do_not_take_the_terminals_interrupt(tiny: Any, tmp_path: Path) -> None:
    groups = tmp_path / "groups"
    source = (
        f"import os\nopen({str(groups)!r}, 'w').write(str(os.getpgid(0)))\n" + tiny.sources["tiny/add.py"]
    )
    (outcome,) = tiny.compile(tiny.unit(module=tiny.source("group", source)))
    assert isinstance(outcome, Compiled)
    assert int(groups.read_text()) != os.getpgid(0)


@pytest.mark.parametrize(
    "answer",
    [
        b"5", b"null", b"[]", b"{}", b'[["ok", true]]', b'{"ok": 1}', b'{"ok": true}', b'{"ok": false}',
        b"\xff", b"[" * 5000, b'{"ok": true, "entry": "x", "shared": "y"}', b"hello",
        b'{"ok": false, "error": 5}', b'{"id": "another", "ok": false, "error": "words"}',
    ],
)  # fmt: skip
def test_an_interpreter_that_answers_nonsense_fails_its_unit(tiny: Any, answer: bytes) -> None:
    code = f"import sys\nfor _ in sys.stdin: sys.stdout.buffer.write({answer!r} + b'\\n'), sys.stdout.flush()"
    pool = Pool({"nvidia": (sys.executable, "-c", code)}, tiny.sources, 1, os.environ)
    (outcome,) = pool.run([tiny.unit()])
    assert isinstance(outcome, Failed)
    assert "no answer" in outcome.error and len(outcome.error) < len(code) + 1000


def test_an_interpreter_that_answers_without_end_fails_its_unit(tiny: Any) -> None:
    (outcome,) = Pool({"nvidia": ("sh", "-c", "tr '\\0' x < /dev/zero")}, tiny.sources, 1, os.environ).run(
        [tiny.unit()]
    )
    assert isinstance(outcome, Failed)
    assert "wrote what is no answer: 'xxx" in outcome.error


# A stand-in for a container: an interpreter that sees nothing of the builder's files or environment.
CONTAINER = """
import os, sys

hidden = tuple(sys.argv[1].split(os.pathsep))

def guard(event, arguments):
    if event == "open" and str(arguments[0]).startswith(hidden):
        raise PermissionError(f"{arguments[0]} is not in this container")

sys.addaudithook(guard)
sys.argv = sys.argv[2:]
assert sys.argv.pop(1) == "exec(input())"
sys.path[0] = ""
exec("exec(input())", {"__name__": "__main__"})
"""


def test_a_command_prefix_needs_no_file_of_the_builders(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    (tmp_path / "enter.py").write_text(CONTAINER)
    hidden = os.pathsep.join((str(Path(toolchain.__file__).parent), str(tmp_path / "scratch")))
    prefix = ("env", "-i", sys.executable, str(tmp_path / "enter.py"), hidden)
    found = toolchain.probe("nvidia", {"nvidia": prefix}, os.environ).require()
    assert found.versions == tiny.toolchain.versions
    (outcome,) = Pool({"nvidia": found.command}, tiny.sources, 1, os.environ).run([tiny.unit()])
    (here,) = tiny.compile(tiny.unit())
    assert isinstance(outcome, Compiled), outcome.error
    assert outcome.data == here.data


FACTS = {"entry": "x", "shared": 0, "num_warps": 4, "num_ctas": 1, "global_scratch": 0, "profile_scratch": 0}


def test_an_answer_to_another_request_is_never_taken(tiny: Any) -> None:
    """An interpreter that says everything twice: the second unit must not get the first one's binary."""
    code = (
        "import json, sys\ninput()\nfor line in sys.stdin:\n"
        f"    facts = {FACTS!r}\n"
        f"    text = json.dumps({{**facts, 'id': json.loads(line)['id'], 'ok': True, 'binary': 'eHh4'}})\n"
        "    print(text + chr(10) + text, flush=True)"
    )
    pool = Pool({"nvidia": (sys.executable, "-c", code)}, tiny.sources, 1, os.environ)
    first, second, third = pool.run([tiny.unit(f"nvidia:sm_8{minor}") for minor in (0, 6, 9)])
    assert isinstance(first, Compiled) and isinstance(third, Compiled)
    assert isinstance(second, Failed) and "to another request" in second.error


@pytest.mark.parametrize(
    "wrong",
    [{"shared": -1}, {"num_warps": 2**31}, {"global_scratch": -8}, {"entry": ""}, {"entry": 'a"; b'},
     {"entry": "\0"}, {"entry": "x" * 300}, {"entry": "x y"}, {"entry": " aiv"}],
)  # fmt: skip
def test_facts_that_no_launcher_can_hold_are_no_answer(wrong: dict[str, Any]) -> None:
    assert checked_answer({"ok": True, **FACTS}) and checked_answer({"ok": True, **FACTS, "entry": "x aiv"})
    with pytest.raises(ValueError, match=f"wanted .*{next(iter(wrong)).partition('_')[0]}"):
        checked_answer({"ok": True, **FACTS, **wrong})


@pytest.mark.parametrize("binary", ["", None, "no base64!", "AAA"])
def test_an_answer_without_a_binary_fails_its_unit(tiny: Any, binary: str | None) -> None:
    text = json.dumps({"ok": True, **FACTS, "binary": binary})
    code = f"input(); input(); print({text!r})"
    (outcome,) = Pool({"nvidia": (sys.executable, "-c", code)}, tiny.sources, 1, os.environ).run(
        [tiny.unit()]
    )
    assert isinstance(outcome, Failed) and "wrote what is no answer" in outcome.error
