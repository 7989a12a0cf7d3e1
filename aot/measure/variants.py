"""Which variant a call takes, by the launcher's rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def chosen(variants: Sequence[Any], ratio: int, aligned: bool, outputs: int) -> Any:
    """The first variant that serves such a call, as the launcher picks it."""
    return next(variant for variant in variants
                if variant.ratio == ratio and (aligned or variant.layout == "general")
                and (variant.max_outputs is None or outputs <= variant.max_outputs))  # fmt: skip
