"""The argument at fault is named, whoever noticed first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvbuild.runtime.arguments import OPERANDS, explain, new_zeros
from kvbuild.runtime.errors import DeviceError

GOOD: list[Any] = [np.zeros(2) for _ in OPERANDS] + [8, 128, 1.0e-6]
FAILURE = RuntimeError("words of someone else")


def read_only() -> np.ndarray:
    array = np.zeros(3)
    array.flags.writeable = False
    return array


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


FAULTS = [
    ([1, 2], TypeError, "wanted a tensor (torch, numpy, or another that exports DLPack), found list"),
    (None, TypeError, "found None"),
    ("x", TypeError, "found str"),
    (object(), TypeError, "found object"),
    (read_only(), ValueError, "wanted a writable array, found a read-only one"),
    (np.zeros(2, ">f4"), TypeError, "native byte order, found dtype >f4"),
    (np.array(["a"]), TypeError, "found dtype <U1"),
    (np.array([object()]), TypeError, "found dtype object"),
    (torch.empty(3, device="meta"), ValueError, "found one on the meta device"),
    (fake(), ValueError, "found a FakeTensor"),
    (torch.eye(3).to_sparse(), ValueError, "found layout torch.sparse_coo"),
]


@pytest.mark.parametrize(("value", "kind", "words"), FAULTS, ids=[words[-24:] for _, _, words in FAULTS])
@pytest.mark.parametrize("place", [0, 4, 8], ids=lambda place: OPERANDS[place])
def test_operands(value: Any, kind: type[Exception], words: str, place: int) -> None:
    arguments = [*GOOD[:place], value, *GOOD[place + 1 :]]
    error = explain(FAILURE, arguments)
    assert type(error) is kind
    assert str(error).startswith(f"{OPERANDS[place]}: ") and words in str(error)


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (9, 8.0, "block_size: wanted an integer, found float"),
        (10, None, "compress_ratio: wanted an integer, found None"),
        (10, "128", "compress_ratio: wanted an integer, found str"),
        (11, "small", "rms_norm_eps: wanted a number, found str"),
    ],
)
def test_scalars(place: int, value: Any, text: str) -> None:
    error = explain(FAILURE, [*GOOD[:place], value, *GOOD[place + 1 :]])
    assert type(error) is TypeError and str(error) == text


def test_the_drivers_refusal_comes_first() -> None:
    error = explain(RuntimeError("DeviceError: CUDA_ERROR_X: words"), [[1], *GOOD[1:]])
    assert type(error) is DeviceError and str(error) == "CUDA_ERROR_X: words"


@pytest.mark.parametrize("error", [TypeError("a"), ValueError("b"), MemoryError("c"), FAILURE])
def test_good_arguments_leave_the_error_as_it_is(error: Exception) -> None:
    assert explain(error, GOOD) is error


def test_what_only_the_exporter_knows() -> None:
    class Stubborn:
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("not today\nand a trace")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    error = explain(BufferError("not today"), [*GOOD[:2], Stubborn(), *GOOD[3:]])
    assert type(error) is ValueError
    assert str(error) == "positions: wanted a tensor that DLPack can export, found: not today"


def test_new_zeros_is_contiguous_and_like_its_model() -> None:
    model = torch.full((3, 8), 7, dtype=torch.uint8)[:, ::2]
    zeros = new_zeros(model)
    assert zeros.shape == (3, 4) and zeros.is_contiguous() and not zeros.any() and zeros.dtype == torch.uint8
    array = new_zeros(np.ones((3, 8), np.uint8)[:, :4])
    assert array.shape == (3, 4) and array.flags.c_contiguous and not array.any()
    for wrong in ([1], None, 3):
        with pytest.raises(TypeError, match="kv_cache: wanted a torch tensor or a numpy array"):
            new_zeros(wrong)
