"""What the environment may ask of the host kernel."""

from __future__ import annotations

from typing import Any

import pytest

from kvbuild.kernels.workloads import Workload, make

WRONG_COUNTS = ("0", "-2", "two", "2x", " 2", "1e3", "9" * 30)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("KVBUILD_CPU_ISA", "sse9", "baseline"),
        *(("KVBUILD_NUM_THREADS", value, "whole number from 1") for value in WRONG_COUNTS),
    ],
)
def test_a_wrong_setting_is_named(
    kernel: Any, name: str, value: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    x = make(Workload.decode(0, 128))
    with pytest.raises(ValueError) as caught:
        kernel(x)
    assert all(word in str(caught.value) for word in (name, wanted, f"'{value}'", "unset it"))
    monkeypatch.setenv(name, "")
    kernel(x)


def test_a_level_that_the_processor_lacks_is_not_used(
    kernel: Any, levels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = make(Workload(1, 128, 128))
    wanted = kernel.fresh(x)
    monkeypatch.setenv("KVBUILD_CPU_ISA", levels[-1])
    assert kernel.fresh(x) == wanted
