"""How the project installs and imports: what a deployment host gets, and what it must not need."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILDER_PACKAGES = ("triton", "ziglang", "yaml", "rich")


def run_python(code: str, cwd: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def without(*packages: str) -> str:
    """Code that makes importing these packages fail as if they were not installed."""
    return f"import sys\nfor name in {packages!r}: sys.modules[name] = None\n"


@pytest.fixture(scope="module")
def wheel_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the project installed from its wheel and nothing else."""
    base = tmp_path_factory.mktemp("wheel")
    source = base / "source"
    skip = shutil.ignore_patterns(
        ".*", "artifacts", "build", "*.egg-info", "__pycache__", "tests", "benchmarks"
    )
    shutil.copytree(ROOT, source, ignore=skip, symlinks=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    built = subprocess.run([*command, "-w", str(base), str(source)], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = base.glob("*.whl")
    site = base / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def run_installed(code: str, site: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs code against the wheel, with the dependencies of this environment but not its editable install."""
    paths = [str(site), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]]
    return run_python(f"import sys\nsys.path[:0] = {paths!r}\n{code}", cwd, "-S")


def test_the_runtime_imports_no_builder_package(tmp_path: Path) -> None:
    code = (
        "import sys, kvbuild.runtime\n"
        "print(sorted({'triton', 'yaml', 'click', 'rich', 'ziglang'} & set(sys.modules)))"
    )
    done = run_python(code, tmp_path)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_the_runtime_works_without_builder_packages(tmp_path: Path, cpu_bundle: Path) -> None:
    code = without(*BUILDER_PACKAGES, "click", "torch")
    code += f"from kvbuild import runtime\nop = runtime.load({str(cpu_bundle)!r}, device='cpu')\n"
    code += "print(op is not None)"
    done = run_python(code, tmp_path)
    assert (done.stdout.strip(), done.returncode) == ("True", 0), done.stderr


@pytest.mark.parametrize("module", ["kvbuild.kernels", "kvbuild.aot", "kvbuild.runtime"])
def test_the_packages_import_outside_the_repository(module: str, tmp_path: Path) -> None:
    done = run_python(f"import {module} as m; print(m.__name__)", tmp_path)
    assert (done.stdout.strip(), done.returncode) == (module, 0), done.stderr


@pytest.mark.parametrize("name", ["kernels", "aot", "runtime"])
def test_bare_names_do_not_find_ours(name: str, tmp_path: Path, wheel_site: Path) -> None:
    code = f"import importlib.util as u; s = u.find_spec({name!r}); print(s and s.origin)"
    for done in (run_python(code, tmp_path), run_installed(code, wheel_site, tmp_path)):
        assert done.returncode == 0, done.stderr
        found = done.stdout.strip()
        assert str(ROOT) not in found and str(wheel_site) not in found, found


def test_the_wheel_installs_under_kvbuild_alone(wheel_site: Path) -> None:
    tops = {entry.name for entry in wheel_site.iterdir() if not entry.name.endswith(".dist-info")}
    assert tops == {"kvbuild"}


def test_the_wheel_carries_every_file_of_the_packages(wheel_site: Path) -> None:
    for package in ("kernels", "aot", "runtime"):
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                inside = wheel_site / "kvbuild" / path.relative_to(ROOT)
                assert inside.is_file(), f"{path.relative_to(ROOT)} is not in the wheel"


def test_the_wheel_loads_a_bundle(wheel_site: Path, tmp_path: Path, cpu_bundle: Path) -> None:
    code = (
        "from kvbuild import runtime\n"
        f"op = runtime.load({str(cpu_bundle)!r}, device='cpu')\n"
        "print(runtime.__file__)"
    )
    done = run_installed(code, wheel_site, tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(wheel_site) in done.stdout


@pytest.mark.parametrize("arguments", [["compile", "--target", "cpu"]])
def test_a_builder_command_without_the_extra_names_the_pip_line(arguments: list[str], tmp_path: Path) -> None:
    code = without(*BUILDER_PACKAGES)
    code += f"from kvbuild.aot.cli.main import main\nsys.exit(main({arguments!r}))"
    done = run_python(code, tmp_path)
    assert done.returncode == 3, done.stderr
    assert "pip install 'kvbuild[compile]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_host_commands_run_without_the_extra(tmp_path: Path, cpu_bundle: Path) -> None:
    for command in ("list", "inspect", "verify", "explain"):
        code = without(*BUILDER_PACKAGES, "torch")
        code += f"from kvbuild.aot.cli.main import main\nsys.exit(main([{command!r}, {str(cpu_bundle)!r}]))"
        done = run_python(code, tmp_path)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def test_check_without_torch_names_the_pip_line(tmp_path: Path, cpu_bundle: Path) -> None:
    code = without("torch")
    code += f"from kvbuild.aot.cli.main import main\nsys.exit(main(['check', {str(cpu_bundle)!r}]))"
    done = run_python(code, tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "pip install torch" in done.stderr
