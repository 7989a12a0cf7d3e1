"""Detection, with a stand-in for each thing that it asks: torch, libcuda, the kernel's topology."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbuild.runtime import device
from kvbuild.runtime.device import detect, gfx_name, kfd_archs, parse_device
from kvbuild.runtime.errors import DeviceError


@pytest.fixture(autouse=True)
def bare_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No torch, no driver, no topology, unless a test says otherwise."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(device, "NVIDIA_LIBRARY", "libcuda-of-nobody.so.1")
    monkeypatch.setattr(device, "KFD_NODES", tmp_path / "absent")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, stand_in_driver: Path) -> Any:
    monkeypatch.setattr(device, "NVIDIA_LIBRARY", str(stand_in_driver))

    def steer(count: int = 4, current: int = 0, init: int = 0) -> None:
        for name, value in (("COUNT", count), ("CURRENT", current), ("INIT", init)):
            monkeypatch.setenv(f"STAND_IN_{name}", str(value))

    steer()
    return steer


@pytest.fixture
def kfd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A topology as the kernel shows it: one cpu node, then two GPUs, with a tenth to sort."""
    nodes = tmp_path / "nodes"
    for number, version in ((0, 0), (2, 90402), (10, 90010)):
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "properties").write_text(f"cpu_cores_count 8\ngfx_target_version {version}\n")
    (nodes / "3").mkdir()
    monkeypatch.setattr(device, "KFD_NODES", nodes)
    return nodes


def fake_torch(**changes: Any) -> SimpleNamespace:
    cuda = {
        "is_available": lambda: True,
        "current_device": lambda: 2,
        "device_count": lambda: 3,
        "get_device_properties": lambda index: SimpleNamespace(
            gcnArchName="gfx942:xnack-", name=f"MI {index}"
        ),
    }
    version = {"cuda": "12.9", "hip": None}
    return SimpleNamespace(
        cuda=SimpleNamespace(**{**cuda, **{k: v for k, v in changes.items() if k in cuda}}),
        version=SimpleNamespace(**{**version, **{k: v for k, v in changes.items() if k in version}}),
    )


def test_a_host_with_nothing_is_a_cpu() -> None:
    facts = detect()
    assert facts == detect("cpu")
    assert (facts.vendor, facts.arch, facts.host) == ("cpu", os.uname().machine, os.uname().machine)
    assert facts.driver == 0 and facts.libc_version is not None


def test_the_driver_is_asked_without_torch(driver: Any) -> None:
    driver(count=4, current=2)
    facts = detect()
    assert (facts.vendor, facts.arch, facts.index) == ("nvidia", "sm_88", 2)
    assert facts.name == "Stand-in 102" and facts.driver == 12040
    assert detect("cuda") == facts
    assert detect("cuda:1").arch == "sm_87" and detect(3).arch == "sm_89"
    driver(count=4, current=-1)
    assert detect().index == 0 and detect("cuda").index == 0


def test_a_driver_without_devices_leaves_the_cpu(driver: Any) -> None:
    driver(count=0)
    assert detect().vendor == "cpu"
    driver(init=100)
    assert detect().vendor == "cpu"


def test_torch_knows_the_current_device(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    assert detect().index == 2 and detect("cuda").index == 2
    assert detect("cuda:1").index == 1
    monkeypatch.setitem(sys.modules, "torch", fake_torch(is_available=lambda: False, cuda=None))
    assert detect().vendor == "cpu"
    assert detect("cuda").vendor == "nvidia"


def test_torch_for_amd(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(cuda=None, hip="6.4"))
    facts = detect()
    assert (facts.vendor, facts.arch, facts.name, facts.index) == ("amd", "gfx942:xnack-", "MI 2", 2)
    assert detect("cuda:0").vendor == detect("rocm:0").vendor == "amd"
    with pytest.raises(DeviceError, match="wanted device 3, found 3, numbered from 0"):
        detect("cuda:3")


def test_the_kernel_knows_amd_devices(kfd: Path) -> None:
    assert kfd_archs(kfd) == ["gfx942", "gfx90a"]
    assert (detect().vendor, detect().arch) == ("amd", "gfx942")
    assert detect("rocm:1").arch == detect("hip:1").arch == detect("cuda:1").arch == "gfx90a"
    with pytest.raises(DeviceError, match="wanted device 2, found 2, numbered from 0"):
        detect("rocm:2")


def test_nvidia_comes_before_amd_unless_amd_is_named(kfd: Path, driver: Any) -> None:
    assert detect().vendor == detect("cuda:0").vendor == "nvidia"
    assert detect("rocm:0").vendor == "amd"


def test_devices_that_are_not_there(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(count=2)
    with pytest.raises(DeviceError, match="wanted device 2, found 2, numbered from 0"):
        detect("cuda:2")
    driver(init=999)
    with pytest.raises(DeviceError, match="cuInit: CUDA_ERROR_UNKNOWN: unknown error"):
        detect("cuda")
    monkeypatch.setattr(device, "NVIDIA_LIBRARY", "libcuda-of-nobody.so.1")
    with pytest.raises(DeviceError, match=r"found no libcuda-of-nobody.so.1 .* device='cpu'"):
        detect("cuda:0")
    with pytest.raises(DeviceError, match="found no device"):
        detect("rocm")


@pytest.mark.parametrize(
    ("given", "kind", "vendor", "index"),
    [
        ("cpu", "cpu", "cpu", 0),
        ("cpu:0", "cpu", "cpu", 0),
        ("cuda", "gpu", None, None),
        ("cuda:7", "gpu", None, 7),
        ("hip:1", "gpu", "amd", 1),
        (5, "gpu", None, 5),
        (SimpleNamespace(type="cuda", index=3), "gpu", None, 3),
        (SimpleNamespace(type="cuda", index=None), "gpu", None, None),
        (SimpleNamespace(type="cpu", index=None), "cpu", "cpu", 0),
    ],
)
def test_devices_as_people_write_them(
    given: object, kind: str, vendor: str | None, index: int | None
) -> None:
    request = parse_device(given)
    assert (request.kind, request.vendor, request.index) == (kind, vendor, index)


@pytest.mark.parametrize(
    "wrong", ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:1 ", "CUDA", "cpu:1", "meta", -1]
)
def test_devices_that_mean_nothing(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"^device: wanted"):
        detect(wrong)


@pytest.mark.parametrize("wrong", [True, 1.0, b"cpu", [], object()], ids=lambda wrong: type(wrong).__name__)
def test_devices_of_the_wrong_type(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"^device: wanted"):
        detect(wrong)


@pytest.mark.parametrize(
    ("version", "name"),
    [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (110000, "gfx1100"), (120001, "gfx1201")],
)
def test_the_kernels_number_as_an_arch(version: int, name: str) -> None:
    assert gfx_name(version) == name


def test_a_real_torch_device_is_taken() -> None:
    assert parse_device(torch.device("cuda:1")).index == 1
    assert detect(torch.device("cpu")).vendor == "cpu"
