from __future__ import annotations

from pathlib import Path

import pytest

from kvbuild.aot import targets, tuning
from kvbuild.aot.errors import RequestError
from kvbuild.kernels.contract import COMPRESS_RATIOS

TILE = "{block_t: 4, block_d: 64, split: 1, num_warps: 4, num_stages: 1, cluster: false}"
GOOD = f"""\
target: nvidia:sm_90
measured: false
source: a sentence
rows:
  128:
    - max_outputs: 32
      tile: {TILE}
      reason: few
    - max_outputs: null
      tile: {TILE}
      reason: many
  256:
    - {{max_outputs: null, tile: {TILE}, reason: any}}
  512:
    - {{max_outputs: null, tile: {TILE}, reason: any}}
"""


@pytest.mark.parametrize(
    ("vendor", "arch"),
    [
        (vendor, arch)
        for vendor in targets.names()
        for arch in targets.load(vendor).ARCHS
        if targets.load(vendor).ROUTE == "gpgpu"
    ],
)
def test_every_arch_has_a_table_that_serves_any_number_of_outputs(vendor: str, arch: str) -> None:
    table = tuning.load(vendor, arch)
    assert table.target == f"{vendor}:{arch}"
    assert sorted(table.rows) == list(COMPRESS_RATIOS)
    for rows in table.rows.values():
        assert rows[-1].max_outputs is None
        assert all(row.max_outputs for row in rows[:-1])
        assert {row.tile.form for row in rows} <= set(targets.load(vendor).forms(arch))


def test_no_table_is_left_without_an_arch() -> None:
    wanted = {
        tuning.path_of(vendor, arch).name
        for vendor in targets.names()
        for arch in targets.load(vendor).ARCHS
        if targets.load(vendor).ROUTE == "gpgpu"
    }
    assert {path.name for path in tuning.FOLDER.glob("*.yaml")} == wanted


def test_values_are_read() -> None:
    table = tuning.parse(GOOD, "t.yaml", "nvidia:sm_90")
    assert (table.measured, table.source) == (False, "a sentence")
    assert [row.max_outputs for row in table.rows[128]] == [32, None]
    assert table.rows[128][0].tile.block_d == 64


def test_an_arch_without_a_table_says_what_to_do() -> None:
    with pytest.raises(RequestError, match=r"nvidia-sm_1.yaml: .*add the file, or give tiles for sm_1"):
        tuning.load("nvidia", "sm_1")


MISTAKES = [
    ("target: nvidia:sm_90", "target: nvidia:sm_80", 1, "target: wanted nvidia:sm_90, found 'nvidia:sm_80'"),
    ("measured: false", "measured: maybe", 2, "measured: wanted true or false, found 'maybe'"),
    ("source: a sentence", "source: ''", 3, "source: wanted text"),
    ("  256:", "  100:", 13, "rows.100: wanted one of 128, 256, 512, found 100"),
    ("  256:", "  128:", 12, "key 128 stands twice"),
    ("      reason: few\n", "", 6, "key 'reason' is missing"),
    ("reason: few", "raeson: few", 8, "unknown key 'raeson'"),
    ("max_outputs: 32", "max_outputs: null", 6, "max_outputs: wanted an integer above 0"),
    ("max_outputs: 32", "max_outputs: 0", 6, "wanted an integer above 0, at most 2147483647 (rows"),
    ("max_outputs: 32", "max_outputs: 99999999999999999999", 6, "at most 2147483647 (rows rise by it"),
    ("max_outputs: 32", "max_outputs: true", 6, "found True"),
    ("max_outputs: null\n", "max_outputs: 64\n", 9, "wanted no limit on the last row"),
    (
        "block_d: 64", "block_d: 63", 7,
        "wanted 64, 128, 256 or 512 where block_t is 4 and cluster false, found 63",
    ),
]


@pytest.mark.parametrize(("old", "new", "line", "text"), MISTAKES, ids=[mistake[1] for mistake in MISTAKES])
def test_a_mistake_names_file_line_and_field(old: str, new: str, line: int, text: str) -> None:
    assert old in GOOD
    with pytest.raises(RequestError) as caught:
        tuning.parse(GOOD.replace(old, new, 1), "t.yaml", "nvidia:sm_90")
    assert str(caught.value).startswith(f"t.yaml:{line}: "), caught.value
    assert text in str(caught.value)


def test_a_table_of_a_persons_own_says_its_target(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert tuning.read(path) == tuning.parse(GOOD, "t.yaml", "nvidia:sm_90")
    for target in ("nvidia:sm_1", "acme:a1", "cpu:x86_64", "ascend:910B2", "nvidia"):
        path.write_text(GOOD.replace("nvidia:sm_90", target))
        with pytest.raises(RequestError, match=rf"mine.yaml:1: target: wanted one of .*, found '{target}'"):
            tuning.read(path)
    with pytest.raises(RequestError, match="cannot be read"):
        tuning.read(tmp_path / "none.yaml")


def test_a_missing_ratio_is_refused() -> None:
    with pytest.raises(RequestError, match="rows: ratio 512 is missing"):
        tuning.parse(GOOD[: GOOD.index("  512:")], "t.yaml", "nvidia:sm_90")


def test_clusters_are_refused_where_the_arch_has_none() -> None:
    clustered = GOOD.replace("cluster: false", "cluster: true")
    assert tuning.parse(clustered, "t.yaml", "nvidia:sm_90").rows[512][0].tile.cluster
    with pytest.raises(RequestError, match="'cluster': wanted false"):
        tuning.parse(clustered.replace("sm_90", "sm_80"), "t.yaml", "nvidia:sm_80")
