"""The bytes of the whole pipeline, by route and layout, against the oracle and each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbuild.kernels.odd_cases import ODD_CASES, far_rows, odd_case, random_case, relocated
from kvbuild.kernels.oracle import expect
from kvbuild.kernels.workloads import Inputs, Workload, make


def on_every_layout(interpreter: Any, x: Inputs, **options: Any) -> bytes:
    """The bytes that each layout leaves: right, and the same."""
    found = {layout: interpreter.check(x, layout, **options).bytes for layout in interpreter.layouts(x)}
    assert len(set(found.values())) == 1, list(found)
    return next(iter(found.values()))


def shifted(x: Inputs, by: int) -> Inputs:
    """The same launch with each window `by` rows earlier, so that no window begins at a leaf's border."""
    return x.with_(positions=x.positions - by)


def few(x: Inputs, count: int = 2) -> Inputs:
    """The launch's first outputs alone."""
    return x.with_(boundary_token_indices=x.boundary_token_indices[:count].clone())


@pytest.mark.parametrize("name", ODD_CASES)
def test_odd_cases(interpreter: Any, name: str) -> None:
    on_every_layout(interpreter, odd_case(name))


def test_the_odd_cases_meet_every_layout(interpreter: Any) -> None:
    found = {name: interpreter.layouts(odd_case(name)) for name in ODD_CASES}
    assert found["shared_blocks"] == ("aligned", "dense", "general")
    assert found["padded_pages"] == ("aligned", "general")
    assert found["block_size_16"] == ("dense", "general")


@pytest.mark.parametrize("ratio", (256, 512))
def test_longer_windows(interpreter: Any, ratio: int) -> None:
    on_every_layout(interpreter, few(shifted(make(Workload(1, 2 * ratio, ratio), seed=ratio), 3), 1))


def rounding_noise(ratio: int) -> Inputs:
    """A window whose weighted sum is 0 but for the rounding of each step, which makes up every byte."""
    x = make(Workload(1, ratio, ratio), seed=ratio, shuffle_blocks=False)
    rows = x.state_cache[: ratio // 8].view(ratio, 1024)
    half = ratio // 2
    rows[:, :512] *= 1e6
    rows[half:] = rows[:half].flip(0)
    rows[half:, :512] *= -1.0
    return x


@pytest.mark.parametrize("by", (0, 1, 5))
def test_every_route_adds_in_the_same_order(interpreter: Any, by: int) -> None:
    x = shifted(rounding_noise(128), by)
    found = {layout: interpreter.run(x, layout) for layout in interpreter.layouts(x)}
    assert len(found) == 3 and len({each.bytes for each in found.values()}) == 1
    # The sums themselves, before anything is rounded away.
    assert len({each.memory["compressed"].numpy().tobytes() for each in found.values()}) == 1
    other = x.with_(positions=x.positions - 1)
    assert interpreter.run(other, "general").bytes != found["general"].bytes


@pytest.mark.parametrize("by", (5, 7))
def test_windows_that_begin_inside_a_leaf(interpreter: Any, by: int) -> None:
    on_every_layout(interpreter, few(shifted(odd_case("shared_blocks", seed=by), by)))


def test_partial_leaves_with_masked_rows(interpreter: Any) -> None:
    x = few(shifted(odd_case("masked_blocks", seed=3), 5))
    # Block 0 again, which holds NaN, at both ends of each window.
    table = x.block_table.clone()
    table[:, 0::16] = -1
    on_every_layout(interpreter, x.with_(block_table=table))


@pytest.mark.parametrize("block_size", (3, 8, 16))
def test_random_launches(interpreter: Any, block_size: int) -> None:
    x = random_case(block_size, block_size=block_size, num_tokens=6, nonsense=0.15)
    on_every_layout(interpreter, x)


@pytest.mark.parametrize("block_d", (64, 256))
def test_the_tile_changes_no_byte(interpreter: Any, block_d: int) -> None:
    x = few(shifted(odd_case("starts_before_zero", seed=8), -2))
    assert on_every_layout(interpreter, x, block_d=block_d) == on_every_layout(interpreter, x)


@pytest.mark.parametrize("layout", ("dense", "general"))
def test_chunks_cores_and_places_change_no_byte(interpreter: Any, layout: str) -> None:
    x = odd_case("mixed_padding", seed=9)
    whole = interpreter.check(x, layout).bytes
    assert interpreter.run(x, layout, chunk=3, cores=1).bytes == whole
    assert interpreter.run(relocated(x, 4), layout, cores=40).bytes == whole


@pytest.mark.parametrize("layout", ("aligned", "general"))
def test_rows_beyond_32_bits(interpreter: Any, layout: str) -> None:
    x = far_rows()
    one = x.with_(boundary_token_indices=x.boundary_token_indices[2:3].clone())
    interpreter.check(one, layout, maker="far_rows")


def test_pages_longer_than_a_window_by_far(interpreter: Any) -> None:
    # Rows and angles with a stride of 0: all rows of a page are one, and the window takes from two pages.
    block_size = 2**33 + 1
    x = make(Workload(1, 128, 128), seed=24)
    rows = x.state_cache.reshape(-1, 1024)
    x = x.with_(
        state_cache=rows.as_strided((2, block_size, 1024), (1024, 0, 1)),
        block_size=block_size,
        block_table=torch.tensor([[1, 0]], dtype=torch.int32),
        cos_sin_cache=x.cos_sin_cache[0].expand(2 * block_size, 64),
        positions=x.positions - 127 + block_size + 50,
    )
    interpreter.check(x, "general")


def test_a_value_that_vanishes_below_zero_leaves_the_same_zero_on_every_route(interpreter: Any) -> None:
    x = few(odd_case("masked_blocks", seed=5), 1)
    state = x.state_cache.clone()
    # A tiny negative sum, then zeros of the same sign with far larger scores, then blocks that are masked.
    state[..., :512], state[..., 512:] = -0.0, 80.0
    state[x.block_table[0, 0].long()] = torch.cat((torch.full((512,), -1e-38), torch.zeros(512)))
    x = x.with_(state_cache=state)
    found = {
        interpreter.run(x, layout).memory["compressed"].numpy().tobytes() for layout in interpreter.layouts(x)
    }
    assert len(found) == 1


def test_what_the_tests_compare_can_differ(interpreter: Any) -> None:
    x = odd_case("shared_blocks")
    state = x.state_cache.clone()
    state[:, 0, 3] += 1.0
    assert interpreter.run(x, "general").bytes != interpreter.run(x.with_(state_cache=state), "general").bytes
    assert expect(*x.call_args()).written.all()
