"""Fixtures that several test modules share."""

from __future__ import annotations

import fcntl
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")

# A shell starts what it puts in the background with interrupts ignored, and programs hand that on to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Outcome:
    """What one command line did."""

    code: int
    out: str
    err: str


@pytest.fixture
def kvbuild(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs one command line in this process: kvbuild("list", path) -> Outcome."""
    from kvbuild.aot.cli.main import main

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all pytest-xdist workers of this session share, and no other session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def build_cache(session_folder: Path) -> Path:
    """The build cache of this session, shared by its workers."""
    return session_folder / "cache"


@pytest.fixture(autouse=True)
def _environment(build_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on, or writes to, the settings and caches of whoever runs it."""
    for name in ("KVBUILD_BUNDLE", "KVBUILD_DEBUG", "KVBUILD_NUM_THREADS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVBUILD_CACHE", str(build_cache))
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture(scope="session")
def host_arch() -> str:
    """This machine's architecture as targets spell it."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


@pytest.fixture(scope="session")
def cpu_bundle(session_folder: Path, build_cache: Path, host_arch: str) -> Iterator[Path]:
    """A bundle with this machine's cpu target: built once a session through the command line; read-only."""
    path = session_folder / "cpu.kvb"
    with open(session_folder / "cpu.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            command = [sys.executable, "-m", "kvbuild.aot.cli.main", "compile"]
            command += ["--target", f"cpu:{host_arch}", "-o", str(path)]
            environment = {**os.environ, "KVBUILD_CACHE": str(build_cache)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"building the shared cpu bundle failed:\n{done.stdout}{done.stderr}"
            path.chmod(0o444)
    yield path
