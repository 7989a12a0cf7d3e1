"""The bytes of the whole pipeline, by route and layout, against the oracle and each other."""

from __future__ import annotations

from typing import Any

import pytest

from kvbuild.kernels.odd_cases import ODD_CASES, odd_case


@pytest.mark.parametrize("name", ODD_CASES)
def test_odd_cases(interpreter: Any, name: str) -> None:
    x = odd_case(name)
    found = {layout: interpreter.check(x, layout).bytes for layout in interpreter.layouts(x)}
    assert len(set(found.values())) == 1
