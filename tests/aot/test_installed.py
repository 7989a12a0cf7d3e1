"""Installing a toolchain: pinned packages, whole or not at all, and never a damaged one."""

from __future__ import annotations

import errno
import json
import os
import platform
import py_compile
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvbuild.aot import installed, toolchain
from kvbuild.aot.errors import BuildError, RequestError, ToolchainError
from kvbuild.aot.targets import ascend

VERSION = f"cpython {ascend.RECIPE.version} {platform.machine()}"


class Pip:
    """Stands in for the interpreter and for pip: writes the files that the packages would."""

    def __init__(self, code: int = 0, version: str = VERSION, leave_out: str = "", pip: bool = True) -> None:
        self.code, self.version, self.leave_out, self.pip = code, version, leave_out, pip
        self.commands: list[list[str]] = []
        self.requirements = ""

    def __call__(self, command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        self.commands.append(list(command))
        if "-c" in command:
            return subprocess.CompletedProcess(command, 0, self.version + "\n")
        if "--version" in command:
            return subprocess.CompletedProcess(command, 0 if self.pip else 1, "")
        self.requirements = Path(command[command.index("--requirement") + 1]).read_text()
        target = Path(command[command.index("--target") + 1])
        for name in (*ascend.RECIPE.key_files, "triton/other.py"):
            if name != self.leave_out:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                (target / name).write_text(f"content of {name}")
        return subprocess.CompletedProcess(command, self.code, "no such version")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"KVBUILD_TOOLCHAINS": str(tmp_path / "toolchains"), "PATH": os.environ["PATH"]}


def install(environ: dict[str, str], pip: Pip | None = None, **options: Any) -> installed.Installed:
    return installed.install("ascend", environ, runner=pip or Pip(), **options)


def left(environ: dict[str, str]) -> list[str]:
    folder = Path(environ["KVBUILD_TOOLCHAINS"])
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_every_package_is_pinned_by_version_and_hash() -> None:
    lines = ascend.RECIPE.requirements().splitlines()
    assert [line.split()[0] for line in lines] == [
        "triton-ascend==3.2.0", "ascendnpu-ir==1.2.0", "numpy==2.4.6", "pybind11==3.1.0",
    ]  # fmt: skip
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[\d.]+( --hash=sha256:[0-9a-f]{64}){1,2}", line)


def test_what_is_installed_is_found_and_not_installed_again(environ: dict[str, str]) -> None:
    assert installed.find("ascend", environ) is None
    pip = Pip()
    first = install(environ, pip)
    assert first.fresh and left(environ) == [first.folder.name]
    assert pip.requirements == ascend.RECIPE.requirements()
    command = pip.commands[-1]
    assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= set(command)
    again = Pip()
    assert install(environ, again) == installed.Installed("ascend", first.folder, first.python, first.tree)
    assert again.commands == []
    found = installed.find("ascend", environ)
    assert found is not None and found.folder == first.folder
    assert found.command == (
        "env", f"PYTHONPATH={first.folder}", first.python, "-S", "-s", "-B", "-X", "pycache_prefix=/dev/null",
    )  # fmt: skip


def test_compiling_takes_it_after_what_a_person_named(environ: dict[str, str]) -> None:
    found = install(environ)
    command, origin, tree = toolchain.command_for("ascend", {}, environ)
    assert f"PYTHONPATH={found.folder}" in command and origin == str(found.folder)
    assert tree == found.tree != ""
    assert toolchain.command_for("ascend", {"ascend": ("mine",)}, environ)[0] == ("mine",)
    assert toolchain.command_for("nvidia", {}, environ) == ((sys.executable,), "", "")


def _damage_size(folder: Path) -> None:
    (folder / "triton/other.py").write_text("longer than it was when it was installed")


def _damage_content(folder: Path) -> None:
    path = folder / "triton/other.py"
    path.write_text(path.read_text().upper())


def _damage_mode(folder: Path) -> None:
    (folder / "triton/other.py").chmod(0o600)


def _link(folder: Path) -> None:
    path = folder / "triton/other.py"
    path.unlink()
    path.symlink_to("y" * len("content of triton/other.py"))


def _remove(folder: Path) -> None:
    (folder / "triton/other.py").unlink()


def _add(folder: Path) -> None:
    (folder / "triton/sitecustomize.py").write_text("")


def _cut_marker(folder: Path) -> None:
    (folder / installed.MARKER).write_text('{"format": 1')


def _no_marker(folder: Path) -> None:
    (folder / installed.MARKER).unlink()


def _no_python(folder: Path) -> None:
    _change_marker(folder, python="/nowhere/python")


def _no_files(folder: Path) -> None:
    _change_marker(folder, files=[1])


def _few_files(folder: Path) -> None:
    _change_marker(folder, files={})


def _newer(folder: Path) -> None:
    _change_marker(folder, format=3)


def _change_marker(folder: Path, **changes: object) -> None:
    marker = json.loads((folder / installed.MARKER).read_text())
    (folder / installed.MARKER).write_text(json.dumps({**marker, **changes}))


DAMAGES = {
    _damage_size: r"triton/other.py: wanted \d+ bytes, found 40 bytes",
    _damage_content: r"triton/other.py: its content is not what was installed",
    _damage_mode: r"triton/other.py: wanted the mode 100644, found 100600",
    _link: r"triton/other.py: wanted the mode 100644, found 120777",
    _remove: r"triton/other.py: wanted \d+ bytes, found no such file",
    _add: r"sitecustomize.py: wanted no such file, found 0 bytes",
    _cut_marker: r"its toolchain.json is missing or cannot be read",
    _no_marker: r"its toolchain.json is missing or cannot be read",
    _no_files: r"its toolchain.json is missing or cannot be read",
    _few_files: r"its toolchain.json is of another kvbuild",
    _newer: r"its toolchain.json is of another kvbuild",
    _no_python: r"its interpreter /nowhere/python is gone",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_a_damaged_one_is_named_never_used_and_made_anew(environ: dict[str, str], damage: Any) -> None:
    folder = install(environ).folder
    damage(folder)
    with pytest.raises(ToolchainError, match=DAMAGES[damage]) as error:
        installed.find("ascend", environ)
    assert str(folder) in str(error.value) and "kvbuild toolchain install ascend" in str(error.value)
    probed = toolchain.probe("ascend", {}, environ)
    assert probed.command == () and probed.missing == (str(error.value),)
    said: list[str] = []
    assert install(environ, say=said.append).fresh
    assert said[0] == str(error.value) and left(environ) == [folder.name]
    assert installed.find("ascend", environ) is not None


def test_one_of_an_older_kvbuild_is_named_as_such(environ: dict[str, str]) -> None:
    folder = install(environ).folder
    (folder / installed.MARKER).write_text('{"format": 1, "python": "python", "sizes": {}, "sha256": {}}')
    with pytest.raises(ToolchainError, match="made by an older kvbuild, .*; install it again: kvb") as error:
        installed.find("ascend", environ)
    assert "damaged" not in str(error.value)
    assert install(environ).fresh and installed.find("ascend", environ) is not None


def test_force_makes_a_whole_one_anew(environ: dict[str, str]) -> None:
    folder = install(environ).folder
    (folder / "triton/__pycache__").mkdir()
    pip = Pip()
    assert install(environ, pip, force=True).fresh and pip.requirements
    assert not (folder / "triton/__pycache__").exists() and left(environ) == [folder.name]


def test_the_digest_is_of_what_compiles_and_of_no_path_of_a_host(environ: dict[str, str]) -> None:
    class Elsewhere(Pip):
        def __init__(self, *names: str) -> None:
            super().__init__()
            self.names = names

        def __call__(self, command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
            done = super().__call__(command, folder)
            for name in self.names if "install" in command else ():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text("#!/some/where/python")
            return done

    plain = install(environ).tree
    for name in ("bin/f2py", "numpy-2.4.6.dist-info/RECORD"):
        assert install(environ, Elsewhere(name), force=True).tree == plain
    for name in ("triton/other.py", "ascendnpuir/bin/bishengir-compile", "triton/new.py"):
        assert install(environ, Elsewhere(name), force=True).tree != plain


def test_compiled_python_is_no_damage(environ: dict[str, str]) -> None:
    folder = install(environ).folder
    (folder / "triton/__pycache__").mkdir()
    (folder / "triton/__pycache__/other.pyc").write_bytes(b"x")
    assert installed.find("ascend", environ) is not None


def test_nothing_that_python_compiled_by_itself_is_run(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("SAYS = 'wrong'\n")
    when = source.stat().st_mtime_ns
    py_compile.compile(str(source))
    source.write_text("SAYS = 'right'\n")
    os.utime(source, ns=(when, when))
    found = installed.Installed("ascend", tmp_path, sys.executable, "")
    for command, said in (
        ((sys.executable, "-S", "-s"), "wrong\n"),  # what Python takes unless it is told otherwise
        (found.command, "right\n"),
    ):
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import module; print(module.SAYS)"
        ask = [*command, "-c", code]
        environ = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
        assert subprocess.run(ask, env=environ, capture_output=True, text=True, check=True).stdout == said


def test_what_pip_refuses_leaves_nothing(environ: dict[str, str]) -> None:
    with pytest.raises(BuildError, match="pip could not install the packages; it said:\nno such version"):
        install(environ, Pip(code=1))
    with pytest.raises(BuildError, match="the packages lack ascendnpuir/bin/bishengir-compile"):
        install(environ, Pip(leave_out="ascendnpuir/bin/bishengir-compile"))
    assert left(environ) == []


def test_an_interrupt_leaves_nothing(environ: dict[str, str]) -> None:
    class Interrupted(Pip):
        def __call__(self, command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
            done = super().__call__(command, folder)
            if "install" in command:
                raise KeyboardInterrupt
            return done

    with pytest.raises(KeyboardInterrupt):
        install(environ, Interrupted())
    assert left(environ) == [] and installed.find("ascend", environ) is None


def test_of_two_at_once_the_first_one_stays(environ: dict[str, str]) -> None:
    class Overtaken(Pip):
        def __call__(self, command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
            done = super().__call__(command, folder)
            if "install" in command:
                first = install(environ)
                (first.folder / "triton/__pycache__").mkdir()
            return done

    found = install(environ, Overtaken())
    assert (found.folder / "triton/__pycache__").is_dir() and left(environ) == [found.folder.name]


def test_another_python_is_told_what_is_needed(environ: dict[str, str]) -> None:
    with pytest.raises(ToolchainError, match=r"wanted CPython 3\.11 .*found .*cpython 3\.12.*--python PATH"):
        install(environ, Pip(version=f"cpython 3.12 {platform.machine()}"))
    with pytest.raises(ToolchainError, match=r"found /no/such \(nothing there\)"):
        install(environ, python="/no/such")
    with pytest.raises(ToolchainError, match="wanted pip for .* -m ensurepip"):
        install(environ, Pip(pip=False))
    assert left(environ) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="wanted a folder for toolchains .*set KVBUILD_TOOLCHAINS"):
        install({**environ, "KVBUILD_TOOLCHAINS": str(tmp_path / "file")})
    with pytest.raises(RequestError, match="HOME is not set; set KVBUILD_TOOLCHAINS"):
        installed.root({})
    assert installed.find("ascend", {}) is None


def test_a_full_disk_is_no_wrong_request(environ: dict[str, str]) -> None:
    class Full(Pip):
        def __call__(self, command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
            if "install" in command:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().__call__(command, folder)

    with pytest.raises(BuildError, match="found: No space left on device; make room, or set KVBUILD_TOOL"):
        install(environ, Full())
    assert left(environ) == []


def test_a_path_that_python_would_cut_in_two_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    apart = {**environ, "KVBUILD_TOOLCHAINS": str(tmp_path / "a:b")}
    pip = Pip()
    with pytest.raises(RequestError, match="a:b: wanted a folder for toolchains without ':' in its path"):
        install(apart, pip)
    assert pip.commands == [] and installed.find("ascend", apart) is None


def test_the_interpreter_is_kept_by_the_name_that_bears_its_version(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    pip = Pip()
    found = install(environ, pip, python="./python")
    assert found.python == os.path.realpath(sys.executable)
    assert pip.commands[0][0] == str(link)  # pip is the named one's
    link.unlink()
    assert installed.find("ascend", environ) is not None


def test_another_interpreter_than_the_installed_ones_is_said(environ: dict[str, str], tmp_path: Path) -> None:
    install(environ)
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    assert not install(environ, python=sys.executable).fresh
    with pytest.raises(RequestError, match=f"wanted a toolchain for {other}, found one .*; replace it with"):
        install(environ, python=str(other))
    with pytest.raises(ToolchainError, match=r"found /no/such \(nothing there\)"):
        install(environ, python="/no/such")


@pytest.mark.parametrize("kind", ["file", "link", "loop"])
def test_what_is_no_folder_at_its_place_is_replaced(
    environ: dict[str, str], kind: str, tmp_path: Path
) -> None:
    folder = install(environ).folder
    moved = tmp_path / "moved"
    folder.rename(moved)
    if kind == "file":
        folder.write_text("")
    else:
        (moved / installed.MARKER).unlink()
        folder.symlink_to(moved if kind == "link" else folder)
    with pytest.raises(ToolchainError, match="is damaged and is not used"):
        installed.find("ascend", environ)
    assert install(environ).fresh
    assert left(environ) == [folder.name] and not folder.is_symlink()
    assert (moved / "triton/other.py").is_file()


def test_what_a_killed_installation_left_goes_with_a_later_one(environ: dict[str, str]) -> None:
    parent = Path(environ["KVBUILD_TOOLCHAINS"])
    for name, age in ((".tmp-1-old", 3 * installed.INSTALL_LIMIT_S), (".tmp-2-new", 60)):
        (parent / name / "packages").mkdir(parents=True)
        os.utime(parent / name, (time.time() - age,) * 2)
    folder = install(environ).folder
    assert left(environ) == [".tmp-2-new", folder.name]


def test_what_pip_downloads_lies_in_the_folder_that_goes(environ: dict[str, str]) -> None:
    pip = Pip()
    install(environ, pip)
    (place,) = [word for word in pip.commands[-1] if word.startswith("TMPDIR=")]
    assert Path(place.partition("=")[2]).parent.parent == Path(environ["KVBUILD_TOOLCHAINS"])


def test_a_whole_toolchain_whose_programs_may_not_run_has_a_remedy(environ: dict[str, str]) -> None:
    folder = install(environ).folder

    def runs(*_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, '{"python": "3.11.2", "triton": "3.2.0"}', "")

    (missing,) = toolchain.probe("ascend", {}, environ, runs).missing
    assert str(folder) in missing and "allow programs to run there, or set KVBUILD_TOOLCHAINS" in missing
    assert "name another interpreter" not in missing


def test_a_vendor_without_a_recipe_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="'amd': kvbuild installs none for it; wanted ascend$"):
        installed.install("amd", environ, runner=Pip())


def test_another_recipe_is_another_folder() -> None:
    other = installed.Recipe((3, 12), ascend.RECIPE.packages, "", ascend.RECIPE.key_files)
    assert other.digest() != ascend.RECIPE.digest() and len(other.digest()) == 16


def test_the_command_line(kvbuild: Any, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBUILD_TOOLCHAINS", environ["KVBUILD_TOOLCHAINS"])
    folder = install(environ).folder
    done = kvbuild("toolchain", "install", "ascend")
    assert done.code == 0 and "already there: triton-ascend 3.2.0" in done.out and str(folder) in done.out
    said = json.loads(kvbuild("toolchain", "install", "ascend", "--json").out)
    assert said["packages"]["ascendnpu-ir"] == "1.2.0" and said["installed"] is False
    assert kvbuild("toolchain", "install", "amd").code == 2
    assert "unknown vendor; wanted ascend\n" in kvbuild("toolchain", "install", "ascendo").err
