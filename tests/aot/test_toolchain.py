from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import pytest

from kvbuild.aot import toolchain
from kvbuild.aot.errors import ToolchainError
from kvbuild.aot.toolchain import Run

HERE = {"PATH": os.environ["PATH"]}


def says(out: str, code: int = 0, err: str = "") -> Run:
    def runner(
        command: Sequence[str], environ: Mapping[str, str], text: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(list(command), code, out, err)

    return runner


def never(command: Sequence[str], environ: Mapping[str, str], text: str) -> subprocess.CompletedProcess[str]:
    raise AssertionError(f"{command} was run")


def test_this_interpreter_is_read_without_a_process_or_an_import_of_triton() -> None:
    code = (
        "import os, sys\n"
        "from kvbuild.aot import toolchain\n"
        "found = toolchain.probe('nvidia', {}, os.environ).require()\n"
        "assert found.command == (sys.executable,)\n"
        "assert 'triton' not in sys.modules and 'torch' not in sys.modules\n"
        "print(found.versions['triton'], found.versions['ptxas'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    triton, ptxas = done.stdout.split()
    assert triton == metadata.version("triton")
    assert int(ptxas.split(".")[0]) >= 12


def test_another_interpreter_is_asked_for_real() -> None:
    given = {"nvidia": (f"{sys.executable} -B",)}
    found = toolchain.probe("nvidia", given, os.environ)
    assert found.command == (sys.executable, "-B")
    assert found.versions == toolchain.probe("nvidia", {}, os.environ).versions


def test_the_variable_comes_before_build_yaml() -> None:
    environ = {**HERE, "KVBUILD_TOOLCHAIN_AMD": "python3 -X dev"}
    assert toolchain.command_for("amd", {"amd": ("other",)}, environ)[0] == ("python3", "-X", "dev")
    assert toolchain.command_for("amd", {"amd": ("other",)}, HERE)[0] == ("other",)
    assert toolchain.command_for("amd", {}, HERE) == ((sys.executable,), "", "")
    assert toolchain.command_for("amd", {"amd": ("a b", "c")}, HERE)[0] == ("a b", "c")


def test_a_path_with_spaces_that_exists_is_one_word(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "my python")
    os.symlink(sys.executable, path)
    assert toolchain.command_for("amd", {"amd": (path,)}, HERE)[0] == (path,)


FOUND = {"python": "3.11", "triton": "3.9.0", "ptxas": "12.9"}


def test_the_versions_found_are_kept() -> None:
    found = toolchain.probe("nvidia", {"nvidia": (sys.executable,)}, HERE, says(json.dumps(FOUND)))
    assert found.require().versions == FOUND


NO_VERSIONS = (
    "5", "null", "[]", '"triton ptxas"', '[["triton", "3"]]', "[" * 5000, '{"triton": 5, "ptxas": "12"}',
    '{"triton": "3.9", "ptxas": "new"}', '{"triton": "3.9", "ptxas": ""}',
    '{"triton": "3.9", "ptxas": "12x.9"}', '{"triton": "present", "ptxas": "12.9"}',
    '{"triton": "3.9", "ptxas": "present"}',
)  # fmt: skip


@pytest.mark.parametrize(
    ("named", "runner", "text"),
    [
        ("/no/such/python", never, "found /no/such/python, which is not there; name one that runs"),
        ("/dev/null", never, "found /dev/null, which is no program; name one that runs"),
        ("'", never, 'toolchains.nvidia.python: "\'" is not a command'),
        (
            "sh",
            says('{"python": "3.8"}'),
            "triton and ptxas .* are not installed by sh .*; install Triton there, or name another",
        ),
        (
            "sh",
            says('{"python": "3.8", "triton": "3.9"}'),
            "nvidia: ptxas .looked for .../triton/backends/nvidia/bin/ptxas. is not installed",
        ),
        ("sh", says("", 7), "found: nothing, exit 7"),
        ("sh", says("hello", 1, "No module named x"), "found: No module named x"),
        *(("sh", says(text), "wanted tool versions by sh") for text in NO_VERSIONS),
    ],
)
def test_what_is_missing_is_said_with_the_remedy(named: str, runner: Run, text: str) -> None:
    found = toolchain.probe("nvidia", {"nvidia": (named,)}, HERE, runner)
    with pytest.raises(ToolchainError, match=text):
        found.require()


def test_a_probe_that_hangs_or_cannot_start_is_said() -> None:
    def hangs(
        command: Sequence[str], environ: Mapping[str, str], text: str
    ) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(list(command), 60)

    found = toolchain.probe("amd", {"amd": ("sh",)}, HERE, hangs)
    assert "cannot be probed by sh" in found.missing[0]


def test_a_missing_extra_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", gone)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for vendor, tool in (("cpu", "zig"), ("nvidia", "triton"), ("amd", "triton")):
        (first, *_) = toolchain.probe(vendor, {}, HERE).missing
        assert tool in first
        assert "pip install 'kvbuild[compile]'" in first


def test_variables_that_could_change_a_binary_do_not_reach_the_compiler() -> None:
    dangerous = dict.fromkeys(
        ("TRITON_DEFAULT_FP_FUSION", "PTXAS_OPTIONS", "DISABLE_PTXAS_OPT", "AMDGCN_USE_BUFFER_OPS", "LLVM_X"),
        "1",
    )
    kept = {"PATH": "/bin", "LD_LIBRARY_PATH": "/lib", "PYTHONPATH": "x"}
    assert toolchain.clean_environment({**dangerous, **kept}) == kept


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("printf '\\377\\376'", "wanted tool versions"),
        ("yes", "found: y y"),
        ("yes >&2", "found: y y"),
        ("exec yes", "found: y y"),
        ("kill -9 $$", "found: nothing, exit -9"),
        ("sleep 1000 & exit 7", "found: nothing, exit 7"),
    ],
)
def test_commands_that_are_no_interpreter_are_said_soon(script: str, text: str) -> None:
    (missing,) = toolchain.probe("nvidia", {"nvidia": ("sh", "-c", script)}, os.environ).missing
    assert text in missing and len(missing) < 2000


def test_words_that_no_command_can_have_are_said() -> None:
    (missing,) = toolchain.probe("nvidia", {"nvidia": ("sh", "a\0b")}, os.environ).missing
    assert "null byte" in missing


def test_a_command_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 1000 & echo $! > {pids}; echo $$ >> {pids}; wait"
    with pytest.raises(subprocess.TimeoutExpired):
        toolchain.run(("sh", "-c", script), os.environ, limit_s=1.0)
    for pid in pids.read_text().split():
        # A child that nobody has waited for yet is still listed, as a zombie.
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
