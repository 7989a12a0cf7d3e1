"""The plain kernels' bytes, in one launch and in two, against the oracle and each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvbuild.aot.plan import Plan
from kvbuild.kernels.contract import COMPRESS_RATIOS, HEAD_DIM
from kvbuild.kernels.gpgpu import route
from kvbuild.kernels.gpgpu.route import Tile
from kvbuild.kernels.odd_cases import ODD_CASES, far_rows, odd_case, random_case, relocated
from kvbuild.kernels.oracle import expect
from kvbuild.kernels.workloads import Inputs, Workload, make

ONE_LAUNCH = Tile(4, 512, 1, 4, 1)
SPLIT = Tile(4, 512, 8, 4, 1)


def plain_shapes(plan: Plan) -> dict[str, tuple[str, Tile]]:
    """A (layout, tile) for each set of constants that plain kernels of ratio 128 are shipped with."""
    found: dict[str, tuple[str, Tile]] = {}
    for kernel in (kernel for target in plan.targets for kernel in target.kernels if kernel.ratio == 128):
        # The interpreter knows no stages.
        constants = {**dict(kernel.form.constexprs), "NUM_STAGES": 1}
        if kernel.form.function in ("compress_fused", "compress_scan"):
            found.setdefault(str(constants), (kernel.layout, kernel.tile))
    return {f"{layout}-{tile.tag}": (layout, tile) for layout, tile in found.values()}


def rounding_noise(num_outputs: int, ratio: int, **options: Any) -> Inputs:
    """Windows whose weighted sum is 0 but for the rounding of each step, which makes up every byte."""
    x = make(Workload(1, num_outputs * ratio, ratio), shuffle_blocks=False, **options)
    rows = x.state_cache[: num_outputs * ratio // x.block_size].view(num_outputs, ratio, 2 * HEAD_DIM)
    half = ratio // 2
    rows[..., :HEAD_DIM] *= 1e6
    rows[:, half:] = rows[:, :half].flip(1)
    rows[:, half:, :HEAD_DIM] *= -1.0
    return x


def slots(x: Inputs) -> list[bytes]:
    """The 584 bytes of each output that has a slot."""
    found = []
    for slot in x.kv_slot_mapping[x.boundary_token_indices].tolist():
        page, place = x.kv_cache[slot // 64].numpy(), slot % 64
        found.append(page[576 * place:][:576].tobytes() + page[64 * 576 + 8 * place:][:8].tobytes())
    return found


@pytest.mark.parametrize("name", ODD_CASES)
def test_odd_cases(interpreter: Any, name: str) -> None:
    x = odd_case(name)
    general = interpreter.check(x, "general")
    if "aligned" in interpreter.layouts(x):
        assert interpreter.check(x, "aligned", SPLIT).bytes == general.bytes


def test_the_odd_cases_meet_both_layouts(interpreter: Any) -> None:
    general = {name for name in ODD_CASES if interpreter.layouts(odd_case(name)) == ("general",)}
    assert general == {
        "block_size_1", "block_size_3", "block_size_16", "block_size_1000", "padded_rows",
        "strided_table", "unaligned_base", "odd_weight",
    }  # fmt: skip


@pytest.mark.parametrize("layout", route.LAYOUTS)
@pytest.mark.parametrize("name", ["nonsense_indices", "starts_before_zero", "no_requests"])
def test_both_forms_sort_out_what_is_not_written(interpreter: Any, name: str, layout: str) -> None:
    x = odd_case(name, seed=1)
    # Alone the first form is `general`, and two launches are `aligned`, in test_odd_cases.
    interpreter.check(x, layout, ONE_LAUNCH if layout == "aligned" else SPLIT)


@pytest.mark.parametrize("layout", route.LAYOUTS)
def test_rows_beyond_32_bits(interpreter: Any, layout: str) -> None:
    x = far_rows()
    one = x.with_(boundary_token_indices=x.boundary_token_indices[2:3].clone())
    interpreter.check(one, layout, maker="far_rows")


@pytest.mark.parametrize("block_size", (2**30 - 1, 2**30, 2**33 + 1))
def test_pages_longer_than_a_window_by_far(interpreter: Any, block_size: int) -> None:
    # Rows and angles with a stride of 0: all rows of a page are one, and the window takes from two pages.
    x = make(Workload(1, 128, 128), seed=24)
    rows = x.state_cache.reshape(-1, 2 * HEAD_DIM)
    x = x.with_(
        state_cache=rows.as_strided((2, block_size, 2 * HEAD_DIM), (2 * HEAD_DIM, 0, 1)),
        block_size=block_size,
        block_table=torch.tensor([[1, 0]], dtype=torch.int32),
        cos_sin_cache=x.cos_sin_cache[0].expand(2 * block_size, 64),
        positions=x.positions - 127 + block_size + 50,
    )
    found = interpreter.check(x, "general")
    other = x.with_(positions=x.positions + 1)
    assert interpreter.check(other, "general", SPLIT).bytes != found.bytes


@pytest.mark.parametrize("block_size", (3, 8, 16))
def test_random_launches(interpreter: Any, block_size: int) -> None:
    x = random_case(
        block_size, block_size=block_size, num_tokens=6, nonsense=0.15,
        kv_page_stride=37440 if block_size == 8 else 37378, kv_columns=37376,
    )  # fmt: skip
    general = interpreter.check(x, "general")
    if block_size == 8:
        assert interpreter.check(x, "aligned").bytes == general.bytes


CUTS: dict[str, Callable[[Inputs], Inputs]] = {
    "tokens": lambda x: x.with_(token_to_req=x.token_to_req[:-1], positions=x.positions[:-1],
                                kv_slot_mapping=x.kv_slot_mapping[:-1]),
    "requests": lambda x: x.with_(block_table=x.block_table[:1]),
    "columns": lambda x: x.with_(block_table=x.block_table[:, :-1]),
    "blocks": lambda x: x.with_(state_cache=x.state_cache[: int(x.block_table[1, 16:].max())]),
    "angles": lambda x: x.with_(cos_sin_cache=x.cos_sin_cache[:-1]),
    "pages": lambda x: x.with_(kv_cache=x.kv_cache[:1]),
}  # fmt: skip


@pytest.mark.parametrize("layout", route.LAYOUTS)
@pytest.mark.parametrize("name", CUTS)
def test_what_lies_behind_an_operand_is_not_used(interpreter: Any, name: str, layout: str) -> None:
    whole = make(Workload(2, 512, 128), seed=19, kv_pages=2)
    # The first window of one request and the last one of the other.
    whole = whole.with_(boundary_token_indices=whole.boundary_token_indices[[0, 3]])
    x = CUTS[name](whole)
    interpreter.check(x, layout, ONE_LAUNCH if layout == "aligned" else SPLIT)
    before, after = expect(*whole.call_args()), expect(*x.call_args())
    assert after.written[0] and not torch.equal(after.expected, before.expected), "the cut takes nothing away"


@pytest.mark.parametrize("ratio", COMPRESS_RATIOS[1:])
def test_longer_windows(interpreter: Any, ratio: int) -> None:
    x = make(Workload(1, ratio, ratio), seed=20)
    assert interpreter.check(x, "aligned").bytes == interpreter.check(x, "general", SPLIT).bytes


def masked_noise(seed: int) -> Inputs:
    """Two windows of rounding noise, the second with missing rows in every part."""
    x = rounding_noise(2, 128, seed=seed)
    table = x.block_table.clone()
    table[0, 16::2] = -1
    return x.with_(block_table=table)


def test_every_shipped_tile_and_layout_gives_the_same_bytes(interpreter: Any, shipped: Plan) -> None:
    x = masked_noise(21)
    x = x.with_(boundary_token_indices=x.boundary_token_indices[1:])
    shapes = plain_shapes(shipped)
    assert {layout for layout, _ in shapes.values()} == set(route.LAYOUTS)
    assert len(shapes) > 4
    found = {name: interpreter.run(x, layout, tile).bytes for name, (layout, tile) in shapes.items()}
    assert {name for name in found if found[name] != found[next(iter(found))]} == set()
    assert found[next(iter(found))] != x.kv_storage.numpy().tobytes()


def test_an_output_has_the_same_bytes_alone_and_in_a_batch(interpreter: Any) -> None:
    x = masked_noise(22)
    boundaries = x.boundary_token_indices
    batch = torch.stack((torch.full_like(boundaries, -1), boundaries.flip(0)), 1).flatten()
    together = interpreter.run(x.with_(boundary_token_indices=batch), "aligned", SPLIT).inputs
    apart = x
    for output in (0, 1):
        apart = apart.with_(boundary_token_indices=boundaries[output : output + 1].clone())
        apart = interpreter.run(apart, "aligned", SPLIT).inputs
    assert torch.equal(apart.kv_storage, together.kv_storage)
    assert torch.equal(interpreter.run(relocated(x, 3), "aligned").inputs.kv_storage, together.kv_storage)


def test_poison_in_one_output_leaves_the_bytes_of_others(interpreter: Any) -> None:
    x = rounding_noise(2, 128, seed=23)
    poisoned = x.with_(state_cache=x.state_cache.clone())
    poisoned.state_cache[x.block_table[0, 3], 1] = torch.nan
    for tile in (ONE_LAUNCH, SPLIT):
        clean, other = (slots(interpreter.run(each, "aligned", tile).inputs) for each in (x, poisoned))
        assert clean[1] == other[1]
        assert clean[0] != other[0]
