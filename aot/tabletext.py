"""The text of a tuning table, in the one shape that aot/tuning.py reads. Needs no YAML package."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence

from ..kernels.gpgpu.route import Tile
from .choice import Row

_WIDTH = 108


def render(target: str, source: str, rows: Mapping[int, Sequence[Row]]) -> str:
    """A measured table. target: VENDOR:ARCH; source: where the numbers come from; rows: by ratio."""
    lines = [f"target: {target}", "measured: true", "source: >-"]
    lines += textwrap.wrap(" ".join(source.split()), _WIDTH, initial_indent="  ", subsequent_indent="  ",
                           break_long_words=False, break_on_hyphens=False)  # fmt: skip
    lines.append("rows:")
    for ratio in sorted(rows):
        lines.append(f"  {ratio}:")
        for row in rows[ratio]:
            limit = "null" if row.max_outputs is None else str(row.max_outputs)
            lines.append(f"    - max_outputs: {limit}")
            lines.append(f"      tile: {_tile(row.candidate.tile)}")
            lines.append(f"      reason: {_scalar(row.reason)}")
    return "\n".join(lines) + "\n"


def _tile(tile: Tile) -> str:
    return "{" + ", ".join(f"{name}: {json.dumps(value)}" for name, value in tile.to_json().items()) + "}"


def _scalar(text: str) -> str:
    """The text plain where YAML reads it back as it stands, else quoted as JSON, which YAML reads too."""
    plain = text.isascii() and text[:1].isalpha() and " " in text and ": " not in text and " #" not in text
    return text if plain and text == text.strip() and not text.endswith(":") else json.dumps(text)
