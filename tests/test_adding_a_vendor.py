"""docs/adding-a-vendor.md is true: its blocks, put where it says into a copy of the project, add a vendor."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "adding-a-vendor.md").read_text(encoding="utf-8")
PACKAGES = ("kernels", "aot", "runtime")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def insert_row(path: Path, row: str) -> None:
    """Puts a row at the end of the VENDORS table of a file."""
    text = path.read_text(encoding="utf-8")
    end = text.index("\n}", text.index("\nVENDORS: "))
    path.write_text(text[: end + 1] + row + text[end + 1 :], encoding="utf-8")


class Copy:
    """The project with the page's steps done, and its command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = folder / "site"
        for package in PACKAGES:
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / package, self.site / "kvbuild" / package, ignore=skip)
        (target,) = blocks("python")
        (row,) = blocks("py")
        table, section = blocks("yaml")
        here = self.site / "kvbuild"
        (here / "aot" / "targets" / "acme.py").write_text(target)
        insert_row(here / "runtime" / "vendors.py", row)
        (here / "kernels" / "tuning" / "acme-a1.yaml").write_text(table)
        text = (ROOT / "build.yaml").read_text(encoding="utf-8")
        text = text.replace("targets:\n", f"targets:\n{section}", 1)
        # One ratio is enough to see it work.
        text = re.sub(r"compress_ratios: \[.*\]", "compress_ratios: [128]", text)
        (folder / "build.yaml").write_text(text)
        (folder / "acme-host.json").write_text(blocks("json")[0])

    def run(self, *arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
        paths = [str(self.site), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]
        code = (
            f"import sys\nsys.path[:0] = {paths!r}\nfrom kvbuild.aot.cli.main import main\n"
            f"sys.exit(main({[str(argument) for argument in arguments]!r}))"
        )
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVBUILD_TOOLCHAIN")}
        return subprocess.run(
            [sys.executable, "-S", "-c", code], cwd=self.folder, capture_output=True, text=True,
            env={**environment, **environ}, timeout=280,
        )  # fmt: skip


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("acme"))


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment that has Acme's SDK: this Python, and a linker that tells its version."""
    folder = tmp_path_factory.mktemp("acme-sdk")
    (folder / "bin").mkdir()
    (folder / "bin" / "acme-ld").write_text("#!/bin/sh\necho acme-ld 7.1.2\n")
    (folder / "bin" / "acme-ld").chmod(0o755)
    return {"ACME_PATH": str(folder), "KVBUILD_TOOLCHAIN_ACME": sys.executable}


def test_without_the_sdk_it_says_what_it_takes(copy: Copy) -> None:
    done = copy.run("compile", "--target", "acme:a1")
    assert done.returncode == 3, done.stderr
    looked = "acme-ld (looked for $ACME_PATH/bin/acme-ld, /opt/acme/bin/acme-ld) is not installed"
    for words in (looked, "install the Acme SDK and its Triton", "KVBUILD_TOOLCHAIN_ACME"):
        assert words in done.stderr
    (acme,) = [
        one
        for one in json.loads(copy.run("doctor", "--json").stdout)["toolchains"]
        if one["vendor"] == "acme"
    ]
    assert (acme["archs"], acme["builds"], acme["ready"]) == (["a1"], [], False)
    assert acme["driver"] == {"names": ["libacme.so"], "present": []}
    unknown = copy.run("compile", "--target", "acme:a2")
    assert unknown.returncode == 2 and "acme:a1" in unknown.stderr


def test_with_it_a_bundle_is_built_that_acmes_devices_alone_take(
    copy: Copy, sdk: dict[str, str], build_cache: Path
) -> None:
    done = copy.run("compile", "--target", "acme:a1", "-o", "acme.kvb", KVBUILD_CACHE=str(build_cache), **sdk)
    assert done.returncode == 0, done.stdout + done.stderr
    assert copy.run("verify", "acme.kvb").returncode == 0
    (target,) = json.loads(copy.run("inspect", "acme.kvb", "--json").stdout)["manifest"]["targets"]
    assert (target["vendor"], target["warp_size"], target["elf_machine"]) == ("acme", 64, 224)
    assert target["toolchain"]["acme-ld"] == "7.1.2"
    assert {kernel["hidden"] for kernel in target["kernels"]} == {2}

    taken = copy.run("explain", "acme.kvb", "--facts", "acme-host.json", "--json")
    assert taken.returncode == 0, taken.stderr
    assert json.loads(taken.stdout)["chosen"] == "acme:a1"
    facts = json.loads((copy.folder / "acme-host.json").read_text())
    facts["marks"] |= {"name": "AMD Instinct MI50", "libraries": []}
    (copy.folder / "amd-host.json").write_text(json.dumps(facts))
    refused = copy.run("explain", "acme.kvb", "--facts", "amd-host.json")
    assert refused.returncode == 1
    assert "its vendor is acme, this device's is amd (its name is AMD Instinct MI50)" in refused.stdout


def test_its_launcher_opens_its_driver(copy: Copy, sdk: dict[str, str], build_cache: Path) -> None:
    bundle = copy.folder / "acme.kvb"
    if not bundle.exists():
        copy.run("compile", "--target", "acme:a1", "-o", bundle, KVBUILD_CACHE=str(build_cache), **sdk)
    with zipfile.ZipFile(bundle) as archive:
        target = json.loads(archive.read("manifest.json"))["targets"][0]
        for blob in target["launchers"].values():
            launcher = archive.read(blob)
            for name in (
                b"libacme.so\0",
                b"acmeModuleLoadData\0",
                b"acmeModuleLaunchKernel\0",
                b"acmeMallocAsync\0",
            ):
                assert name in launcher
            assert b"libamdhip64" not in launcher


def test_the_page_names_every_member_a_target_has() -> None:
    from kvbuild.aot.targets import Vendor

    (target,) = blocks("python")
    members = set(Vendor.__annotations__) | {
        n for n, v in vars(Vendor).items() if callable(v) and n[0] != "_"
    }
    for name in members:
        assert re.search(rf"^(def )?{name}\b", target, re.MULTILINE), name
