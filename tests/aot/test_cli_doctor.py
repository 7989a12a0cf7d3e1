"""`kvbuild doctor`: says what is there and what is missing, and never fails."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kvbuild.aot import finish, targets, toolchain
from kvbuild.aot.cli import doctor
from kvbuild.runtime import device
from kvbuild.runtime.facts import Facts

Run = Callable[..., Any]


def test_it_names_tools_devices_and_the_cache(kvbuild: Run, build_cache: Path, host_arch: str) -> None:
    text = kvbuild("doctor")
    assert text.code == 0
    for words in (f"triton {metadata.version('triton')}", f"cpu:{host_arch}", str(build_cache), "ptxas"):
        assert words in text.out
    found = json.loads(kvbuild("doctor", "--json").out)
    assert found["packages"]["torch"] == metadata.version("torch")
    assert {one["vendor"] for one in found["toolchains"]} >= {"nvidia", "amd", "cpu"}
    assert all(one["ready"] for one in found["toolchains"] if one["vendor"] in ("nvidia", "amd", "cpu"))
    assert found["devices"][0]["vendor"] == "cpu"
    assert found["cache"] == {"folder": str(build_cache), "writable": True, "problem": None}


def test_what_is_missing_comes_with_the_pip_line(kvbuild: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name in ("torch", "ziglang"):
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    done = kvbuild("doctor")
    assert done.code == 0
    missing = [line for line in done.out.splitlines() if line.startswith("missing: ")]
    assert any("torch" in line and "pip install torch" in line for line in missing)
    assert any("ziglang" in line and "pip install 'kvbuild[compile]'" in line for line in missing)
    assert "nothing is missing" not in done.out


def test_a_cache_that_cannot_be_written_is_a_finding(
    kvbuild: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("KVBUILD_CACHE", str(file))
    done = kvbuild("doctor")
    assert done.code == 0
    assert "not writable" in done.out and "KVBUILD_CACHE" in done.out


def test_a_broken_build_yaml_is_a_finding(
    kvbuild: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "build.yaml").write_text("version: [")
    monkeypatch.chdir(tmp_path)
    found = doctor.examine()
    assert found["config"]["problem"] and found["config"]["problem"] in found["missing"]
    assert kvbuild("doctor").code == 0


def test_a_package_that_is_half_there_is_a_finding(kvbuild: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise SyntaxError("cut off")

    monkeypatch.setattr("kvbuild.aot.spec.load", lambda path: Broken().anything)
    done = kvbuild("doctor")
    assert done.code == 0
    assert "missing: PyYAML cannot be imported (SyntaxError: cut off); pip install --force-re" in done.out


def test_a_folder_that_is_gone_is_no_error(
    kvbuild: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("KVBUILD_TOOLCHAINS", "relative")
    assert kvbuild("doctor").code == 0
    done = kvbuild("toolchain", "install", "ascend")
    assert done.code == 2 and "relative: wanted a folder for toolchains, found that the cur" in done.err


def test_a_driver_that_says_nonsense_is_a_finding(kvbuild: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    here = device.cpu_facts()

    def detect(index: int) -> Facts:
        return replace(here, vendor="nvidia", name="\x1b[2J", index=index, driver=-7)

    monkeypatch.setattr(device, "detect", detect)
    monkeypatch.setattr(doctor, "_MAX_DEVICES", 3)
    done = kvbuild("doctor")
    assert done.code == 0 and done.out.count("device  nvidia:") == 3
    assert "\x1b" not in done.out and r"\x1b[2J" in done.out


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has the runtime and torch, and none of the packages that compile."""
    real, spec = metadata.version, importlib.util.find_spec

    def version(name: str) -> str:
        if name in doctor.COMPILING:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "triton" else spec(name, *rest)
    )
    for name in ("yaml", "rich", "ziglang", "triton"):
        monkeypatch.setitem(sys.modules, name, None)


def test_a_deployment_host_lacks_nothing_by_not_compiling(kvbuild: Run, deployed: None) -> None:
    found = json.loads(kvbuild("doctor", "--json").out)
    assert (found["role"], found["missing"]) == ("deploy", [])
    assert not any(one["ready"] for one in found["toolchains"])
    text = kvbuild("doctor").out
    assert (
        "this host loads bundles and compiles none; to compile here: pip install 'kvbuild[compile]'" in text
    )
    assert text.rstrip().endswith("\nnothing is missing for what was set up")
    assert "cannot compile" not in text and "not writable" not in text


def test_what_a_deployment_host_needs_is_still_missed(
    kvbuild: Run, deployed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = doctor.examine()
    assert found["role"] == "deploy"
    assert found["missing"] == ["torch, for kvbuild check, and most callers: pip install torch"]


def test_each_vendor_has_a_line_about_what_it_takes(kvbuild: Run) -> None:
    text = kvbuild("doctor").out
    found = json.loads(kvbuild("doctor", "--json").out)
    assert found["role"] == "build"
    for one in found["toolchains"]:
        module = targets.load(one["vendor"])
        (line,) = [
            line for line in text.splitlines() if line.startswith(f"{one['vendor']} ") and "here" not in line
        ]
        assert ("-" in line.split()[1]) is (not one["builds"])
        if one["ready"]:
            assert one["builds"] == list(module.ARCHS)
            continue
        (how,) = [line for line in text.splitlines() if line.startswith(f"{one['vendor']} cannot compile ")]
        for tool in module.needs(module.ARCHS[-1]):
            assert tool in one["versions"] or f"{tool} (looked for " in how
        for path in module.LOOKUP[module.needs(module.ARCHS[-1])[-1]].paths:
            assert path.replace("{triton}", ".../triton") in how
        assert module.SDK in how and f"KVBUILD_TOOLCHAIN_{one['vendor'].upper()}" in how
    # That a vendor's toolchain is elsewhere is nothing that this host lacks.
    assert found["missing"] == []


def test_a_variable_that_nobody_reads_is_warned_of(kvbuild: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBUILD_TOOLCHAIN_ILUVATAR", sys.executable)
    monkeypatch.setenv("KVBUILD_TOOLCHAIN_CPU", sys.executable)
    found = json.loads(kvbuild("doctor", "--json").out)
    cpu, iluvatar = found["warnings"]
    assert cpu.startswith("KVBUILD_TOOLCHAIN_CPU is set, and no vendor's interpreter is looked for there")
    assert iluvatar.endswith("KVBUILD_TOOLCHAIN_TIANSHU; did you mean tianshu?") and found["missing"] == []
    assert f"warning: {iluvatar}\nnothing is missing for what was set up\n" in kvbuild("doctor").out


def test_a_named_toolchain_that_lacks_its_tools_is_missing(
    kvbuild: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBUILD_TOOLCHAIN_METAX", sys.executable)
    found = doctor.examine()
    (text,) = found["missing"]
    assert text.startswith("metax: backend-metax (looked for ")
    assert "install MetaX's MACA SDK and its Triton there, or name another interpreter" in text
    (metax,) = [one for one in found["toolchains"] if one["vendor"] == "metax"]
    assert metax["named_in"] == "KVBUILD_TOOLCHAIN_METAX" and metax["builds"] == []
    assert f"missing: {text}" in kvbuild("doctor").out


def test_an_sdk_that_is_there_is_found(kvbuild: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A made-up MACA environment: a Python whose `triton` has MetaX's backend, and an mxcc."""
    package = tmp_path / "site" / "triton"
    (package / "backends" / "metax").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '3.0.0'\n")
    (package / "backends" / "metax" / "compiler.py").write_text("")
    mxcc = tmp_path / "maca" / "mxgpu_llvm" / "bin" / "mxcc"
    mxcc.parent.mkdir(parents=True)
    mxcc.write_text("#!/bin/sh\necho mxcc version 1.0.0\n")
    mxcc.chmod(0o755)
    prefix = f"env PYTHONPATH={tmp_path / 'site'} MACA_PATH={tmp_path / 'maca'} {sys.executable}"
    monkeypatch.setenv("KVBUILD_TOOLCHAIN_METAX", prefix)
    (metax,) = [one for one in doctor.examine()["toolchains"] if one["vendor"] == "metax"]
    assert metax["ready"] and metax["builds"] == ["c500", "c600"]
    assert metax["versions"] == {"triton": "3.0.0", "backend-metax": "present", "mxcc": "1.0.0"}
    assert "metax     c500 c600 " in kvbuild("doctor").out


@pytest.fixture
def no_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in finish.HOMES:
        monkeypatch.delenv(name, raising=False)


def test_a_host_without_anything_of_ascends_has_no_line_of_it(kvbuild: Run, no_cann: None) -> None:
    text = kvbuild("doctor").out
    assert "hivmc" not in text and "torch_npu" not in text
    found = json.loads(kvbuild("doctor", "--json").out)["ascend"]
    assert "found none" in found.pop("problem")
    assert found == {"hivmc": None, "cann": None, "libascendcl": False, "torch_npu": None}


def test_what_there_is_of_ascends_has_its_line(
    kvbuild: Run, monkeypatch: pytest.MonkeyPatch, no_cann: None, tmp_path: Path
) -> None:
    tool = tmp_path / "tools/bishengir/bin/hivmc"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\necho hivmc 1.4.2\n")
    tool.chmod(0o755)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    text = kvbuild("doctor").out
    assert f"ascend  hivmc: {tool}, version 1.4.2\n        CANN: {tmp_path} (ASCEND_HOME_PATH)\n" in text
    assert "libascendcl.so: not found; `source /usr/local/Ascend/ascend-toolkit/set_env.sh`" in text
    assert "torch_npu: not installed" in text
    tool.unlink()
    (tmp_path / "libascendcl.so").write_text("")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    text = kvbuild("doctor").out
    assert "ascend  hivmc: wanted CANN's compiler of HIVM, found none" in text
    assert "libascendcl.so: found" in text


def test_an_npu_alone_has_the_lines_too() -> None:
    found = {"hivmc": None, "problem": "none", "cann": None, "libascendcl": False, "torch_npu": None}
    npu = replace(device.cpu_facts(), vendor="ascend", arch="910B2")
    assert doctor._ascend_lines(found, [device.cpu_facts()]) == []
    assert len(doctor._ascend_lines(found, [device.cpu_facts(), npu])) == 4


def test_a_host_that_compiles_for_some_vendor_is_not_said_to_compile_nothing(
    kvbuild: Run, deployed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(vendor: str, *_: object) -> toolchain.Toolchain:
        return toolchain.Toolchain(vendor, ("python",), {"triton": "3.2.0"}, ())

    monkeypatch.setattr(toolchain, "probe", probe)
    text = kvbuild("doctor").out
    assert "compiles none" not in text and "to compile here: pip install 'kvbuild[compile]'" in text
