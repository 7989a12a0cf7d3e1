"""The layout's arithmetic, and the refusal of operands that the contract does not allow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvbuild.kernels import contract
from kvbuild.kernels.contract import OPERANDS, check_operands
from kvbuild.kernels.odd_cases import ODD_CASES, odd_case
from kvbuild.kernels.workloads import Inputs, Workload, make


def _check(inputs: Inputs, **changes: int) -> None:
    settings = {"block_size": inputs.block_size, "compress_ratio": inputs.compress_ratio, **changes}
    check_operands({operand.name: getattr(inputs, operand.name) for operand in OPERANDS}, **settings)


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return make(Workload.decode(2, 128))


def test_the_layout_adds_up() -> None:
    assert (contract.NUM_GROUPS, contract.TOKEN_STRIDE, contract.SLOT_BYTES) == (7, 576, 584)
    assert contract.SCALE_OFFSET == 36864
    assert contract.MIN_PAGE_STRIDE == 37376
    assert contract.EXPONENT_MANTISSA_LIMIT / 2**23 == 0.984375
    assert len(OPERANDS) == 9


@pytest.mark.parametrize("name", ODD_CASES)
def test_operands_within_the_contract_pass(name: str) -> None:
    _check(odd_case(name))


REFUSED: dict[str, tuple[type[Exception], str, Callable[[Inputs], dict[str, torch.Tensor]]]] = {
    "dtype": (TypeError, "positions: wanted dtype int64, found int32",
              lambda i: {"positions": i.positions.int()}),
    "two dtypes": (TypeError, "rms_norm_weight: wanted dtype bfloat16 or float32, found float64",
                   lambda i: {"rms_norm_weight": i.rms_norm_weight.double()}),
    "rank": (ValueError, r"block_table: wanted \[num_reqs, blocks_per_req\]",
             lambda i: {"block_table": i.block_table[0]}),
    "fixed extent": (ValueError, r"cos_sin_cache: wanted 64 = 64 .* found shape \(\d+, 32\)",
                     lambda i: {"cos_sin_cache": i.cos_sin_cache[:, :32]}),
    "named extent": (ValueError, r"kv_slot_mapping: wanted num_tokens = 3 \(as token_to_req has it\)",
                     lambda i: {"kv_slot_mapping": i.kv_slot_mapping[:2]}),
    "last stride": (ValueError, "boundary_token_indices: wanted a last stride of 1, found 2",
                    lambda i: {"boundary_token_indices": i.boundary_token_indices[::2]}),
    "device": (ValueError, "positions: wanted device cpu .* found meta",
               lambda i: {"positions": i.positions.to("meta")}),
    "narrow page": (ValueError, r"kv_cache: wanted shape\[1\] >= 37376, found 37375",
                    lambda i: {"kv_cache": i.kv_cache[:, :37375]}),
    "odd page stride": (ValueError, "kv_cache: wanted an even page stride, found 37377",
                        lambda i: {"kv_cache": i.kv_storage.as_strided((1, 37376), (37377, 1))}),
    "odd base": (ValueError, "kv_cache: wanted an even base address",
                 lambda i: {"kv_cache": i.kv_storage.as_strided((1, 37376), (37440, 1), 1)}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_operands_are_refused_by_name(inputs: Inputs, name: str) -> None:
    kind, message, change = REFUSED[name]
    with pytest.raises(kind, match=message):
        _check(inputs.with_(**change(inputs)))


def test_other_numbers_are_refused_by_name(inputs: Inputs) -> None:
    with pytest.raises(ValueError, match=r"block_size: wanted 8 \(state_cache.shape\[1\]\), found 16"):
        _check(inputs, block_size=16)
    with pytest.raises(ValueError, match=r"compress_ratio: wanted one of \(128, 256, 512\), found 64"):
        _check(inputs, compress_ratio=64)
