"""The tuning space: only tiles that the route implements, that an arch can run and whose memory it has."""

from __future__ import annotations

import pytest

from kvbuild.aot import targets
from kvbuild.kernels.gpgpu import route, space

EVERY = [
    (vendor, arch)
    for vendor in targets.names()
    for arch in targets.load(vendor).ARCHS
    if targets.load(vendor).ROUTE == "gpgpu"
]


def candidates(vendor: str, arch: str) -> tuple[route.Tile, ...]:
    module = targets.load(vendor)
    return space.candidates(module.forms(arch), module.shared_memory(arch))


@pytest.mark.parametrize(("vendor", "arch"), EVERY)
def test_every_candidate_can_be_planned_and_is_there_once(vendor: str, arch: str) -> None:
    found = candidates(vendor, arch)
    assert len(set(found)) == len(found) >= 24
    for tile in found:
        tile.check()
        assert route.kernels_for(128, "aligned", tile)
    assert {tile.form for tile in found} == set(targets.load(vendor).forms(arch))


def test_rings_that_do_not_fit_are_left_out() -> None:
    streams = {
        arch: [tile.num_stages for tile in candidates("nvidia", arch) if tile.form == "stream"]
        for arch in ("sm_80", "sm_89", "sm_90", "sm_120")
    }
    assert streams == {"sm_80": [1, 2, 3, 4], "sm_89": [1, 2], "sm_90": [1, 2, 3, 4], "sm_120": [1, 2]}


def test_the_rings_bytes() -> None:
    assert space.ring_bytes(route.Tile(8, 512, 1, 4, 3)) == 3 * 32768
    assert space.ring_bytes(route.Tile(4, 64, 1, 4, 2, True)) == 2 * 16384
    assert space.ring_bytes(route.Tile(4, 512, 8, 4, 2)) == 2 * 16384


def test_simpler_forms_come_first() -> None:
    forms = [tile.form for tile in candidates("nvidia", "sm_90")]
    assert forms == sorted(forms, key=["stream", "cluster", "block"].index)
    for vendor, arch in EVERY:
        # A call that nobody pins needs no scratch.
        assert route.scratch_per_output(candidates(vendor, arch)[0]) == 0
