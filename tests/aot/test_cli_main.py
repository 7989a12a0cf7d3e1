"""The frame of the command line: codes, words, JSON, interrupts; what every command has in common."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from kvbuild import runtime
from kvbuild.aot import errors
from kvbuild.aot.cli import frame, output
from kvbuild.aot.cli import main as main_module

Run = Callable[..., Any]


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Makes `kvbuild list` raise."""

    @click.command()
    @click.argument("rest", nargs=-1, type=click.UNPROCESSED)
    @output.json_option
    def command(rest: tuple[str, ...], as_json: bool) -> int:
        raise error

    monkeypatch.setattr(frame.CommandGroup, "get_command", lambda *_: command)


def test_the_help_lists_every_command(kvbuild: Run) -> None:
    done = kvbuild("--help")
    assert done.code == 0
    for name in frame.COMMANDS:
        assert f"\n  {name} " in done.out


@pytest.mark.parametrize("name", frame.COMMANDS)
def test_each_command_has_help_and_json(name: str, kvbuild: Run) -> None:
    done = kvbuild(name, "--help")
    assert done.code == 0
    assert "--json" in done.out


def test_no_arguments_is_a_wrong_request_with_the_help(kvbuild: Run) -> None:
    done = kvbuild()
    assert (done.code, done.out) == (2, "")
    assert "Usage: kvbuild" in done.err


def test_version(kvbuild: Run) -> None:
    done = kvbuild("--version")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("kvbuild ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lst"], "No such command 'lst'"),
        (["list"], "Missing argument"),
        (["list", "--what", "x"], "No such option"),
        (["merge", "a.kvb"], "Missing option"),
    ],
)
def test_wrong_usage_is_code_2_on_stderr(arguments: list[str], words: str, kvbuild: Run) -> None:
    done = kvbuild(*arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.err and "--help" in done.err


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (errors.RequestError("no such target"), 2, "no such target"),
        (errors.ToolchainError("no triton"), 3, "no triton"),
        (errors.BuildError("ptxas died"), 1, "ptxas died"),
        (runtime.BundleError("cut"), 1, "cut"),
        (runtime.NoMatchingArtifact("nothing fits"), 1, "nothing fits"),
        (runtime.DeviceError("CUDA_ERROR_X"), 1, "CUDA_ERROR_X"),
        (FileNotFoundError(2, "No such file or directory", "gone"), 2, "gone: No such file or directory"),
        (PermissionError(13, "Permission denied", "closed"), 2, "closed: Permission denied"),
        (OSError(28, "No space left on device", "full"), 1, "full: No space left on device"),
        (ZeroDivisionError("by zero"), 1, "internal error: ZeroDivisionError: by zero"),
    ],
)
def test_errors_become_words_and_a_code(
    error: Exception, code: int, words: str, kvbuild: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(monkeypatch, error)
    plain = kvbuild("list")
    assert (plain.code, plain.out) == (code, "")
    assert words in plain.err
    as_json = kvbuild("list", "--json")
    assert (as_json.code, as_json.err) == (code, "")
    found = json.loads(as_json.out)["error"]
    assert (found["kind"], found["exit_code"]) == (type(error).__name__, code)
    assert words in found["message"]


def test_wrong_usage_with_json_is_json(kvbuild: Run) -> None:
    done = kvbuild("list", "--json")
    assert (done.code, done.err) == (2, "")
    assert json.loads(done.out)["error"]["exit_code"] == 2


def test_an_internal_error_shows_its_traceback_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, ZeroDivisionError("by zero"))
    assert main_module.main(["list"]) == 1
    quiet = capsys.readouterr().err
    assert "KVBUILD_DEBUG=1" in quiet and "Traceback" not in quiet
    monkeypatch.setenv("KVBUILD_DEBUG", "1")
    assert main_module.main(["list"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_one_line_and_130(kvbuild: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, KeyboardInterrupt())
    done = kvbuild("list")
    assert (done.code, done.out) == (130, "")
    assert "interrupted" in done.err
    as_json = kvbuild("list", "--json")
    assert (as_json.code, json.loads(as_json.out)["error"]["exit_code"]) == (130, 130)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_request_to_end_cleans_up(
    ending: signal.Signals, kvbuild: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned = []

    @click.command()
    @output.json_option
    def command(as_json: bool) -> int:
        try:
            os.kill(os.getpid(), ending)
            time.sleep(10)
        finally:
            cleaned.append(as_json)
        return 0

    monkeypatch.setattr(frame.CommandGroup, "get_command", lambda *_: command)
    before = signal.getsignal(ending)
    done = kvbuild("list")
    assert (done.code, done.out) == (128 + ending, "")
    assert done.err.strip() == "kvbuild: interrupted; nothing half-written was left"
    as_json = kvbuild("list", "--json")
    assert json.loads(as_json.out)["error"]["exit_code"] == as_json.code == 128 + ending
    assert cleaned == [False, True]
    assert signal.getsignal(ending) is before


def test_an_ignored_signal_stays_ignored(kvbuild: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As nohup has it."""
    seen = []

    @click.command()
    def command() -> int:
        seen.append(signal.getsignal(signal.SIGHUP))
        return 0

    monkeypatch.setattr(frame.CommandGroup, "get_command", lambda *_: command)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert kvbuild("list").code == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen == [signal.SIG_IGN]


def test_an_interrupt_while_the_command_line_is_still_being_imported(
    kvbuild: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "kvbuild.aot.cli.frame":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "kvbuild.aot.cli.frame")
    monkeypatch.delattr("kvbuild.aot.cli.frame")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    done = kvbuild("list", "--json")
    assert (done.code, done.err) == (130, "")
    assert json.loads(done.out)["error"]["kind"] == "Interrupted"


def test_the_entry_imports_no_click() -> None:
    """It would take longest, and an interrupt in it would show a traceback."""
    code = "import sys, kvbuild.aot.cli.main; sys.exit('click' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_closed_pipe_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "kvbuild.aot.cli.main", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 1


@pytest.mark.parametrize("settings", [{}, {"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}], ids=str)
@pytest.mark.parametrize("name", [b"\xff\xe9.kvb", "\u00e9.kvb".encode(), b"new\nline.kvb"])
def test_any_file_name_is_printed_in_any_locale(
    settings: dict[str, str], name: bytes, cpu_bundle: Path, tmp_path: Path
) -> None:
    path = os.fsencode(tmp_path) + b"/" + name
    os.symlink(cpu_bundle, path)
    command = [sys.executable, "-m", "kvbuild.aot.cli.main", "list"]
    environment = {**os.environ, **settings}
    for file, code in ((path, 0), (path + b".none", 2)):
        plain = subprocess.run([*command, file], env=environment, capture_output=True)
        assert plain.returncode == code and b"internal" not in plain.stderr
        as_json = subprocess.run([*command, file, "--json"], env=environment, capture_output=True)
        assert as_json.returncode == code
        found = json.loads(as_json.stdout.decode("ascii"))
        if code == 0:
            assert os.fsencode(found["bundle"]) == file


@pytest.mark.parametrize("redirection", ["2>&-", ">&-", ">&- 2>&-", ">/dev/full", ">/dev/full 2>&1", "<&-"])
@pytest.mark.parametrize("arguments", ["list {} --json", "list none.kvb", "list none.kvb --json", "doctor"])
def test_streams_that_take_nothing_leave_no_traceback(
    arguments: str, redirection: str, cpu_bundle: Path
) -> None:
    command = f"exec {sys.executable} -m kvbuild.aot.cli.main {arguments.format(cpu_bundle)} {redirection}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert done.returncode in (0, 1, 2)


@pytest.mark.parametrize(
    ("codes", "one"), [([], 0), ([0, 1], 1), ([1, 3], 3), ([3, 2, 1], 2), ([1, 2], 2), ([0, 0], 0)]
)
def test_of_several_codes_one_counts(codes: list[int], one: int) -> None:
    assert output.combine(codes) == one


@pytest.mark.parametrize("command", ["list", "inspect", "verify", "explain", "check"])
def test_a_missing_bundle_is_code_2_and_says_what_to_do(command: str, kvbuild: Run, tmp_path: Path) -> None:
    missing = kvbuild(command, tmp_path / "none.kvb")
    assert (missing.code, missing.out) == (2, "")
    assert "found nothing at" in missing.err and "kvbuild compile" in missing.err
    folder = kvbuild(command, tmp_path)
    assert folder.code == 2 and "found a folder" in folder.err
    os.mkfifo(tmp_path / "pipe")
    for endless in (tmp_path / "pipe", "/dev/zero"):
        done = kvbuild(command, endless)
        assert done.code == 2 and "a device, socket or pipe" in done.err


@pytest.mark.parametrize("command", ["list", "inspect", "verify", "explain", "check"])
def test_a_damaged_bundle_is_code_1(command: str, kvbuild: Run, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.kvb"
    damaged.write_bytes(b"PK\x03\x04" + bytes(100))
    done = kvbuild(command, damaged)
    assert (done.code, done.out) == (1, "")
    assert str(damaged) in done.err


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    assert output.writable_file(tmp_path / "new.kvb") == tmp_path / "new.kvb"
    assert list(tmp_path.iterdir()) == []
    for place, words in (
        (tmp_path, "a folder there"),
        (tmp_path / "none" / "x.kvb", "no folder"),
        (Path(os.devnull), "a device, socket or pipe there"),
        (tmp_path / ("x" * 300) / "y", "File name too long"),
    ):
        with pytest.raises(errors.RequestError, match=words):
            output.writable_file(place)
    with pytest.raises(errors.RequestError, match="found a folder's"):
        output.writable_file(f"{tmp_path}/new/")
    assert list(tmp_path.iterdir()) == []


def test_tables_align() -> None:
    text = output.table(("name", "bytes"), [("a", 1), ("long name", 100)], right=("bytes",))
    assert text.splitlines() == ["name       bytes", "a              1", "long name    100"]


def test_colour_obeys_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    assert output.paint("ok", "green") == "ok"
    monkeypatch.delenv("NO_COLOR")
    assert output.paint("ok", "green") != "ok"
