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
        (11, "1e-6", "rms_norm_eps: wanted a number, found str"),
        *(
            (place, np.array(odd), f"{name}: wanted {kind}, found numpy.ndarray")
            for place, name, kind in (
                (9, "block_size", "an integer"),
                (10, "compress_ratio", "an integer"),
                (11, "rms_norm_eps", "a number"),
            )
            for odd in (["a"], [None], ["2020-01-01T00:00"], [1, 2])
        ),
    ],
)
def test_scalars(place: int, value: Any, text: str) -> None:
    error = explain(FAILURE, [*GOOD[:place], value, *GOOD[place + 1 :]])
    assert type(error) is TypeError and str(error) == text


def test_the_drivers_refusal_comes_first() -> None:
    error = explain(RuntimeError("DeviceError: CUDA_ERROR_X: words"), [[1], *GOOD[1:]])
    assert type(error) is DeviceError and str(error) == "CUDA_ERROR_X: words"


class Exports:
    """Says that it exports DLPack, and does not."""

    def __init__(self, capsule: Any, device: Any) -> None:
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> Any:
        if isinstance(self.device, Exception):
            raise self.device
        return self.device


@pytest.mark.parametrize(("capsule", "device"), [(5, (1, 0)), (None, "x"), (None, KeyError("z"))], ids=repr)
def test_an_exporter_that_exports_nothing_is_named(capsule: Any, device: Any) -> None:
    """TVM-FFI's own ValueError names no argument."""
    error = explain(ValueError("Expect a dltensor field"), [*GOOD[:4], Exports(capsule, device), *GOOD[5:]])
    assert type(error) is ValueError
    assert str(error).startswith("block_table: wanted a tensor that DLPack can export, found: ")


def test_an_error_that_names_an_argument_is_kept() -> None:
    said = ValueError("positions: wanted 1 dimension, found 2")
    assert explain(said, [*GOOD[:4], Exports(5, (1, 0)), *GOOD[5:]]) is said


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(torch.ones(2, 8), 0.1, 0, torch.quint8),
        lambda: torch.nested.nested_tensor([torch.ones(8), torch.ones(8)]),
        lambda: torch.ones(2, 8).to_sparse(),
        lambda: torch.ones(2, 8, device="meta"),
    ],
    ids=["quantized", "nested", "sparse", "meta"],
)
@pytest.mark.filterwarnings("ignore")
def test_no_zeros_are_made_like_what_has_no_plain_memory(make: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="kv_cache: wanted"):
        new_zeros(make())
