"""Tuning tables: which tile config an arch runs for which ratio and how many outputs, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..kernels import tuning as tables
from ..kernels.contract import COMPRESS_RATIOS, HEAD_DIM
from ..kernels.gpgpu.route import Tile, scratch_per_output
from . import document, targets
from .errors import RequestError
from .targets import MAX_OUTPUTS, Limits

FOLDER = Path(next(iter(tables.__path__)))
_KEYS = ("target", "measured", "source", "rows")


@dataclass(frozen=True)
class Row:
    """One tile and the largest number of outputs it serves; None means any number."""

    max_outputs: int | None
    tile: Tile


@dataclass(frozen=True)
class Table:
    """A tuning table. rows: per ratio, by rising max_outputs, the last without a limit.

    measured: whether the rows were timed on that chip; source: where the numbers or the reasoning come from.
    """

    target: str
    measured: bool
    source: str
    rows: Mapping[int, tuple[Row, ...]]


def path_of(vendor: str, arch: str) -> Path:
    """The file that holds an arch's table."""
    return FOLDER / f"{vendor}-{arch}.yaml"


def load(vendor: str, arch: str) -> Table:
    """Reads an arch's table from the package. Raises RequestError where it is missing or wrong."""
    path = path_of(vendor, arch)
    try:
        text = document.read(path)
    except RequestError as error:
        raise RequestError(
            f"the tuning table of {vendor}:{arch}: {error}; "
            f"add the file, or give tiles for {arch} in build.yaml"
        ) from None
    return parse(text, str(path), f"{vendor}:{arch}")


def read(path: Path) -> Table:
    """Reads a table of a person's own, as `kvbuild tune` writes it, for the target that it names itself.

    Raises RequestError where it cannot be read, is wrong, or is for no target that has tiles to choose.
    """
    text = document.read(path)
    named = document.parse(text, str(path)).record(_KEYS)["target"]
    known = _tuned()
    if named.text() not in known:
        named.fail(f"wanted one of {', '.join(known)}, found {named.found()}; name a table that is for one")
    return parse(text, str(path), named.text())


def _tuned() -> list[str]:
    tiled = [vendor for vendor in targets.names() if targets.load(vendor).ROUTE == "gpgpu"]
    return [f"{vendor}:{arch}" for vendor in tiled for arch in targets.load(vendor).ARCHS]


def parse(text: str, file: str, target: str) -> Table:
    """Checks the text of a table for `target`. Raises RequestError as `file:line: field: wanted, found`."""
    keys = document.parse(text, file).record(_KEYS)
    if keys["target"].text() != target:
        keys["target"].fail(f"wanted {target}, found {keys['target'].found()}")
    vendor, _, arch = target.partition(":")
    limits = targets.limits(vendor, arch)
    rows: dict[int, tuple[Row, ...]] = {}
    for ratio, value in keys["rows"].items():
        if type(ratio) is not int or ratio not in COMPRESS_RATIOS:
            value.fail(f"wanted one of {', '.join(map(str, COMPRESS_RATIOS))}, found {ratio!r}")
        rows[ratio] = parse_rows(value, nested=True, limits=limits)
    for ratio in COMPRESS_RATIOS:
        if ratio not in rows:
            keys["rows"].fail(f"ratio {ratio} is missing; wanted {', '.join(map(str, COMPRESS_RATIOS))}")
    return Table(target, keys["measured"].boolean(), keys["source"].text(), rows)


def parse_rows(value: document.Value, *, nested: bool, limits: Limits) -> tuple[Row, ...]:
    """A list of rows, by rising max_outputs.

    nested: each row is {max_outputs, tile: {...}, reason} as in a table; else the tile's own keys and an
    optional max_outputs, as in build.yaml. limits: what the arch's tiles must keep to.
    """
    rows: list[Row] = []
    entries = value.list()
    for position, entry in enumerate(entries):
        last = position == len(entries) - 1
        if nested:
            keys = entry.record(("max_outputs", "tile", "reason"))
            keys["reason"].text()
            limit_at, tile_at = keys["max_outputs"], keys["tile"]
            limit = limit_at.scalar()
            mapping = dict(tile_at.items())
        else:
            mapping = dict(entry.items())
            tile_at = entry
            limit_at = mapping.pop("max_outputs", entry)
            limit = None if limit_at is entry else limit_at.scalar()
        wanted = "no limit on the last row, so that every number of outputs is served"
        if last and limit is not None:
            limit_at.fail(f"max_outputs: wanted {wanted}, found {limit!r}")
        if not last:
            floor = rows[-1].max_outputs or 0 if rows else 0
            if type(limit) is not int or not floor < limit <= MAX_OUTPUTS:
                limit_at.fail(
                    f"max_outputs: wanted an integer above {floor}, at most {MAX_OUTPUTS} (rows rise by it, "
                    f"and only the last has none), found {limit!r}"
                )
        rows.append(Row(limit if isinstance(limit, int) else None, _tile(tile_at, mapping, limits)))
    return tuple(rows)


def _tile(at: document.Value, mapping: Mapping[object, document.Value], limits: Limits) -> Tile:
    try:
        tile = Tile.parse({str(key): value.scalar() for key, value in mapping.items()})
    except ValueError as error:
        at.fail(str(error))
    if tile.form not in limits.forms:
        if tile.cluster:
            at.fail("tile key 'cluster': wanted false, found true; this arch has no thread-block clusters")
        at.fail(f"tile key 'block_t': wanted 4, found {tile.block_t}; no kernel streams pages on this arch")
    if tile.num_warps > limits.max_warps:
        at.fail(
            f"tile key 'num_warps': wanted at most {limits.max_warps} on this arch, found {tile.num_warps}"
        )
    if scratch_per_output(tile) and not limits.scratch:
        at.fail(
            f"wanted block_d {HEAD_DIM} and split 1, found {tile.block_d} and {tile.split}; such a tile "
            "takes scratch memory, and this vendor's driver is not known to allocate in a stream's order"
        )
    return tile
