"""Pieces of C text that launch tables are made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..errors import BuildError


def c_string(text: str) -> str:
    """A C string literal. The names that end up in a table are plain; BuildError for anything else."""
    if not re.fullmatch(r"[A-Za-z0-9_.$:-]+", text):
        raise BuildError(f"launch table: wanted a name of letters, digits and _.$:-, found {text!r}")
    return f'"{text}"'


def offsets(field_names: Iterable[str]) -> list[str]:
    """Where fields of kvb_operands lie."""
    return [f"offsetof(kvb_operands, {name})" for name in field_names]


def array(kind: str, name: str, items: Sequence[str]) -> list[str]:
    """The lines that define a static array; none where it would be empty."""
    if not items:
        return []
    return [f"static {kind} {name}[] = {{", *(f"  {item}," for item in items), "};", ""]
