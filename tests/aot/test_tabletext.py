"""The table that tune writes without a YAML package is the one that the builder reads with one."""

from __future__ import annotations

import pytest
import yaml

from kvbuild.aot import tuning
from kvbuild.aot.choice import Candidate, Row
from kvbuild.aot.tabletext import render
from kvbuild.kernels.gpgpu.route import Tile

CLUSTER = Candidate(4, Tile(4, 64, 1, 4, 4, True), 1, 0, 66000)
STREAM = Candidate(0, Tile(8, 512, 1, 4, 1), 1, 0, 33000)
ROWS = [Row(16, CLUSTER, "few outputs; 4.4 us for 1 output"), Row(None, STREAM, "many")]
SOURCE = "Timed on one NVIDIA H200 (driver 580.159.04) on 2026-01-02 03:04:05 UTC: medians. " * 3


def test_the_builder_reads_what_is_written() -> None:
    text = render("nvidia:sm_90", SOURCE, {512: ROWS[1:], 128: ROWS, 256: ROWS})
    table = tuning.parse(text, "t.yaml", "nvidia:sm_90")
    assert (table.measured, table.source) == (True, SOURCE.strip())
    found = [(row.max_outputs, row.tile) for row in table.rows[128]]
    assert found == [(16, CLUSTER.tile), (None, STREAM.tile)]
    assert [len(table.rows[ratio]) for ratio in (128, 256, 512)] == [2, 2, 1]
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize(
    "reason",
    ["plain words; 1.5 us", "a colon: inside", "ends with:", "# no comment", "a #hash", "true", "- dash", "é",
     '"quoted"', "{braces}", "1.5 us", " space", "back\\slash: x"],
)  # fmt: skip
def test_every_reason_comes_back_as_it_was(reason: str) -> None:
    text = render("nvidia:sm_90", "s", {ratio: [Row(None, STREAM, reason)] for ratio in (128, 256, 512)})
    tuning.parse(text, "t.yaml", "nvidia:sm_90")
    assert yaml.safe_load(text)["rows"][128][0]["reason"] == reason
