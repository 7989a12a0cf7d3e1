from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvbuild.runtime.stream import teller


class Told:
    """A launcher that has to be told of streams."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def use_stream(self, index: int, stream: int) -> None:
        self.told.append((index, stream))


@pytest.mark.parametrize(
    ("package", "part", "function"),
    [
        ("torch_npu", "_C", "_npu_getCurrentRawStream"),
        ("torch_musa", "_MUSAC", "_musa_getCurrentRawStream"),
    ],
)
def test_the_frameworks_current_stream_is_told_before_a_call(
    package: str, part: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = iter((41, 42))
    framework = SimpleNamespace(**{part: SimpleNamespace(**{function: lambda index: next(streams) + index})})
    monkeypatch.setitem(sys.modules, package, framework)
    launcher: Any = Told()
    tell = teller(launcher, 3)
    assert tell is not None
    tell()
    tell()
    assert launcher.told == [(3, 44), (3, 45)], "asked anew for each call"


def test_without_such_a_framework_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torch_npu", "torch_musa"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    launcher: Any = Told()
    tell = teller(launcher, 0)
    assert tell is not None
    tell()
    assert launcher.told == []


def test_a_launcher_that_gets_the_stream_with_the_tensors_is_told_nothing() -> None:
    launcher: Any = SimpleNamespace(use_stream=None)
    assert teller(launcher, 0) is None
