"""The pipeline on this host: what it needs, and a process that runs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "aot/standin"))
sys.path.insert(0, str(Path(__file__).parent))
import hosttools
from bench import Bench, Executor, build_running
from recording import Recording, build_recording

from kvbuild.aot import toolchain


def missing(environment: dict[str, str]) -> str:
    """What keeps the pipeline from running here, or nothing."""
    if hosttools.find(environment) is None:
        return f"LLVM's tools of version {hosttools.VERSION}"
    return "" if frontend(environment) else "the Ascend toolchain"


def frontend(environment: dict[str, str]) -> tuple[str, ...]:
    """The command of the interpreter that has triton-ascend; () where there is none."""
    found = toolchain.probe("ascend", {}, environment)
    return () if found.missing else found.command


@pytest.fixture(scope="session")
def bench(session_folder: Path, worker_id: str) -> Bench:
    """The launcher, and every stage lowered to this host: some forty compilations, once a session."""
    environment = hosttools.own_environment()
    lacking = missing(environment)
    if lacking:
        pytest.fail(f"wanted {lacking}, found none; `make test-ascend` installs it")
    tools = hosttools.find(environment)
    assert tools is not None
    return build_running(tools, frontend(environment), session_folder / f"ascend-{worker_id}", session_folder)


@pytest.fixture(scope="module")
def npu(bench: Bench) -> Iterator[Executor]:
    """A process that has opened the launcher; work is done as soon as it is launched."""
    running = Executor(bench)
    yield running
    running.close()


@pytest.fixture(scope="session")
def recording(session_folder: Path, worker_id: str) -> Recording:
    """The launcher with binaries that do nothing, and a stand-in ACL that records what it is asked for."""
    return build_recording(session_folder / f"acl-{worker_id}", session_folder)


@pytest.fixture
def acl(recording: Recording, tmp_path: Path) -> Any:
    """acl(scenario, **settings of the stand-in) -> what the scenario said, and the calls that ACL got."""

    def scenario(text: str, **settings: str) -> tuple[Any, list[dict[str, Any]]]:
        return recording.run(text, tmp_path, **settings)

    return scenario
