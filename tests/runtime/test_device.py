"""Detection, with a stand-in for each thing that it asks: torch, libcuda, the kernel's topology."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvbuild import runtime
from kvbuild.runtime import device, drivers, identity, libraries, vendors
from kvbuild.runtime import operator as operator_module
from kvbuild.runtime.device import detect, gfx_name, kfd_nodes, parse_device, torch_marks
from kvbuild.runtime.errors import DeviceError


@pytest.fixture(autouse=True)
def bare_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No torch, no driver, no topology, unless a test says otherwise."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for name, api in vendors.APIS.items():
        if api.driver is not None:
            present(monkeypatch, name, Path(f"lib{name}-of-nobody.so.1"))
    monkeypatch.setattr(device, "KFD_NODES", tmp_path / "absent")
    monkeypatch.setattr(drivers, "PCI_DEVICES", tmp_path / "pci")
    monkeypatch.setattr(libraries, "LINKER_CACHE", tmp_path / "ld.so.cache")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)


def present(monkeypatch: pytest.MonkeyPatch, api: str, path: Path) -> None:
    """Makes the library at `path` the driver of an interface."""
    vendor = vendors.APIS[api].vendor
    row = vendors.VENDORS[vendor]
    changed = replace(row, driver=replace(row.driver, libraries=(str(path),)))
    monkeypatch.setitem(vendors.VENDORS, vendor, changed)  # type: ignore[arg-type]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, stand_in_driver: Path) -> Any:
    present(monkeypatch, "cuda", stand_in_driver)

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
        vendor = "vendor_id 4098\n" if number == 2 else ""
        text = f"cpu_cores_count 8\n{vendor}gfx_target_version {version}\n"
        (nodes / str(number) / "properties").write_text(text)
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
    assert facts.name == "NVIDIA Stand-in 102" and facts.driver == 12040
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
    # NVIDIA's driver tells its version too, so it is asked even where torch could tell the rest.
    assert (detect().name, detect().driver, detect().vendor) == ("NVIDIA Stand-in 102", 12040, "nvidia")
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
    assert kfd_nodes(kfd) == [("gfx942", "1002"), ("gfx90a", "")]
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
    present(monkeypatch, "cuda", Path("libcuda-of-nobody.so.1"))
    with pytest.raises(DeviceError, match=r"found no libcuda-of-nobody.so.1 .* device='cpu'"):
        detect("cuda:0")
    with pytest.raises(DeviceError, match="found no device"):
        detect("rocm")


@pytest.mark.parametrize(
    ("given", "kind", "api", "index"),
    [
        ("cpu", "cpu", None, 0),
        ("cpu:0", "cpu", None, 0),
        ("cuda", "gpu", None, None),
        ("cuda:7", "gpu", None, 7),
        ("hip:1", "gpu", "hip", 1),
        ("rocm", "gpu", "hip", None),
        ("musa:2", "gpu", "musa", 2),
        ("npu", "gpu", "npu", None),
        (5, "gpu", None, 5),
        (SimpleNamespace(type="cuda", index=3), "gpu", None, 3),
        (SimpleNamespace(type="cuda", index=None), "gpu", None, None),
        (SimpleNamespace(type="cpu", index=None), "cpu", None, 0),
    ],
)
def test_devices_as_people_write_them(given: object, kind: str, api: str | None, index: int | None) -> None:
    request = parse_device(given)
    assert (request.kind, request.api, request.index) == (kind, api, index)


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


def on_the_bus(folder: Path, vendor: str) -> None:
    """Shows the stand-in driver's device on the PCI bus, as `vendor`'s."""
    place = folder / "pci" / "0001:ca:00.0"
    place.mkdir(parents=True, exist_ok=True)
    (place / "vendor").write_text(f"0x{vendor}\n")


@pytest.mark.parametrize(
    ("name", "capability", "pci", "vendor", "arch"),
    [
        ("NVIDIA H200", "9.0", "10de", "nvidia", "sm_90"),
        ("NVIDIA H200", "9.0", None, "nvidia", "sm_90"),
        ("A800-SXM4-80GB", "8.0", "10de", "nvidia", "sm_80"),
        ("PPU-ZW810E", "8.0", "1ded", "thead", "ppu001"),
        ("PPU-ZW810E", "8.9", None, "thead", "ppu0015"),
        ("Iluvatar BI-V150", "7.1", None, "tianshu", "ivcore11"),
        ("MetaX C500", "8.0", None, "metax", "c500"),
    ],
)
def test_a_driver_under_the_name_of_nvidias_is_looked_through(
    driver: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    name: str, capability: str, pci: str | None, vendor: str, arch: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("STAND_IN_NAME", name)
    monkeypatch.setenv("STAND_IN_CAPABILITY", capability)
    if pci is not None:
        on_the_bus(tmp_path, pci)
    facts = detect("cuda:1")
    assert (facts.vendor, facts.arch, facts.name, facts.index) == (vendor, arch, name, 1)
    assert facts.marks is not None and facts.marks.pci == (pci or "")


def test_a_device_of_nobody_known_is_refused(
    driver: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STAND_IN_NAME", "Chip One")
    on_the_bus(tmp_path, "abcd")
    with pytest.raises(
        DeviceError, match="device 0 .Chip One.: wanted a device of one vendor.*PCI vendor is abcd"
    ):
        detect("cuda")
    on_the_bus(tmp_path, "10de")
    assert detect("cuda").vendor == "nvidia"
    monkeypatch.setenv("STAND_IN_NAME", "PPU-1")
    with pytest.raises(DeviceError, match="nvidia: its PCI vendor is 10de; thead: its name is PPU-1"):
        detect("cuda")


@pytest.mark.parametrize(
    ("api", "prefix", "name", "asked", "vendor", "arch"),
    [
        ("hggc", "hg", "PPU-ZW810E", "cuda:1", "thead", "ppu001"),
        ("musa", "mu", "MTT S4000", "musa:1", "mthreads", "mp_80"),
        ("maca", "mc", "MetaX C500", "cuda:1", "metax", "c500"),
        ("maca", "mc", "MXC600", "cuda:1", "metax", "c600"),
    ],
)
def test_each_vendors_own_driver_is_asked_where_there_is_no_torch(
    driver: Any, monkeypatch: pytest.MonkeyPatch, stand_in_for: Callable[[str], Path],
    api: str, prefix: str, name: str, asked: str, vendor: str, arch: str,
) -> None:  # fmt: skip
    present(monkeypatch, "cuda", Path("libcuda-of-nobody.so.1"))
    library = stand_in_for(prefix)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    present(monkeypatch, api, library)
    monkeypatch.setattr(libraries, "_loaded", lambda name: str(name) == str(library))
    monkeypatch.setenv("STAND_IN_NAME", name)
    monkeypatch.setenv("STAND_IN_CAPABILITY", "8.0")
    driver(count=2, current=1)
    for request in (None, asked, asked.split(":")[0]):
        facts = detect(request)
        assert (facts.vendor, facts.arch, facts.name, facts.index) == (vendor, arch, name, 1)
        assert facts.driver_library == str(library)
    with pytest.raises(DeviceError, match="wanted device 2, found 2"):
        detect(asked.replace("1", "2"))
    driver(init=999)
    assert detect().vendor == "cpu"
    with pytest.raises(DeviceError, match=f"{prefix}Init: .*: unknown error"):
        detect(asked)


def test_a_drivers_missing_function_is_named(
    driver: Any, monkeypatch: pytest.MonkeyPatch, stand_in_for: Callable[[str], Path]
) -> None:
    present(monkeypatch, "cuda", stand_in_for("hg"))
    with pytest.raises(DeviceError, match="wanted a driver with the function cuInit, found one without it"):
        detect("cuda")


def test_cann_names_its_npus(monkeypatch: pytest.MonkeyPatch, stand_in_for: Callable[[str], Path]) -> None:
    library = stand_in_for("aclrt")
    present(monkeypatch, "npu", library)
    monkeypatch.setattr(libraries, "_loaded", lambda name: str(name) == str(library))
    facts = detect("npu:3")
    assert (facts.vendor, facts.arch, facts.index) == ("ascend", "910B2", 3)
    assert detect().vendor == "ascend"


def test_a_hygon_device_in_the_kernels_topology_is_no_amd_one(kfd: Path) -> None:
    (kfd / "2" / "properties").write_text("vendor_id 7572\ngfx_target_version 90006\n")
    assert (detect("rocm:0").vendor, detect("rocm:0").arch) == ("hygon", "gfx906")
    assert detect("rocm:1").vendor == "amd"


def torch_of(kind: str, name: str, marks: dict[str, Any], **properties: Any) -> SimpleNamespace:
    """A torch whose devices of one kind all have these properties; marks: of torch.version and of torch."""
    module = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 1,
        device_count=lambda: 2,
        get_device_properties=lambda index: SimpleNamespace(name=name, **properties),
    )
    idle = SimpleNamespace(is_available=lambda: False)
    version = {"cuda": "12.1", "hip": None, **marks.get("version", {})}
    parts = {"cuda": idle, kind: module, **marks.get("torch", {})}
    return SimpleNamespace(version=SimpleNamespace(**version), **parts)


MACA, COREX, HIP = {"version": {"maca": "3.7"}}, {"torch": {"corex": True}}, {"version": {"hip": "6"}}
PPU = {"torch": {"__version__": "2.9.0+ali.ppu2.0"}}
HCU = {**HIP, "torch": {"__hcu_version__": "1"}}


@pytest.mark.parametrize(
    ("kind", "name", "marks", "properties", "vendor", "arch"),
    [
        ("cuda", "MetaX C500", MACA, {"major": 8, "minor": 0}, "metax", "c500"),
        ("cuda", "Device", MACA, {"major": 10, "minor": 0}, "metax", "c500"),
        ("cuda", "BI-V150", COREX, {"major": 7, "minor": 1}, "tianshu", "ivcore11"),
        ("cuda", "PPU", PPU, {"major": 8, "minor": 9}, "thead", "ppu0015"),
        ("cuda", "K100_AI", HIP, {"gcnArchName": "gfx928:xnack-"}, "hygon", "gfx928:xnack-"),
        ("cuda", "?", HIP, {"gcnArchName": "gfx906"}, "amd", "gfx906"),
        ("cuda", "?", HCU, {"gcnArchName": "gfx906"}, "hygon", "gfx906"),
        ("musa", "MTT S4000", {}, {"major": 2, "minor": 2}, "mthreads", "mp_22"),
        ("npu", "Ascend910B2", {}, {}, "ascend", "910B2"),
    ],
)
def test_torch_tells_of_devices_that_no_driver_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str, marks: dict[str, Any], properties: dict[str, Any],
    vendor: str, arch: str,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", torch_of(kind, name, marks, **properties))
    for asked, index in ((None, 1), (f"{kind}:0", 0)):
        facts = detect(asked)
        assert (facts.vendor, facts.arch, facts.index) == (vendor, arch, index)
    with pytest.raises(DeviceError, match="wanted device 2, found 2"):
        detect(f"{kind}:2")


def test_no_mark_is_invented() -> None:
    assert torch_marks(torch) == (("version.hip",) if torch.version.hip else ())
    assert torch_marks(SimpleNamespace()) == ()


def test_to_look_for_libraries_loads_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "libone.so").write_bytes(b"no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path / 'a'}:{tmp_path / 'absent'}")
    (tmp_path / "ld.so.cache").write_bytes(b"\0libtwo.so\0/opt/x/libtwo.so\0/opt/x/libthree.so.1\0")
    names = ("libone.so", "libtwo.so", "libthree.so", "libfour.so", "libc.so.6")
    (tmp_path / "a" / "libfolder.so").mkdir()
    assert libraries.present(("libfolder.so",)) == ()
    assert libraries.present(names) == ("libone.so", "libtwo.so", "libc.so.6")


def test_detection_starts_no_process_and_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, subprocess, os\n"
        "def refuse(*_, **__): raise SystemExit('a process')\n"
        "subprocess.Popen = os.system = os.posix_spawn = os.fork = refuse\n"
        "from kvbuild.runtime import device\n"
        "device.detect()\n"
        "assert 'torch' not in sys.modules\n"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_call_asks_nobody_whose_device_it_is(
    stand_in_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("asked in a call")

    monkeypatch.setitem(sys.modules, "torch", torch)
    with runtime.load(stand_in_bundle, device="cpu") as operator:
        for place, name in ((operator_module, "detect"), (identity, "identify"), (libraries, "present")):
            monkeypatch.setattr(place, name, refuse)
        monkeypatch.setattr(drivers.Driver, "open", refuse)
        page = np.zeros(8, np.uint8)
        operator.compress(*(np.zeros(1) for _ in range(8)), page, 8, 128)
        assert page[0] == 42


def test_an_npu_without_canns_library_is_told_where_that_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_torch", lambda: None)
    monkeypatch.setattr(libraries, "present", lambda names: ())
    with pytest.raises(DeviceError) as error:
        device.detect("npu:0")
    assert str(error.value).endswith(
        " on this host; it comes with Ascend's CANN: install that, and `source "
        "/usr/local/Ascend/ascend-toolkit/set_env.sh` (wherever that lies) before Python starts, or load "
        "with device='cpu'"
    )
