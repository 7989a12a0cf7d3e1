"""What importing and using the runtime brings into a process, and what it needs of the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FORBIDDEN = ("triton", "yaml", "click", "rich", "ziglang", "kvbuild.aot", "kvbuild.kernels")

# Hides torch, so that the processes start quickly, and with it proves that none is needed.
COMPUTE = """
import sys
sys.modules["torch"] = None
import numpy as np
from kvbuild import runtime
operator = runtime.load(sys.argv[1])
table, slots = np.zeros((1, 32), np.int32), np.zeros(1, np.int64)
state = np.ones((32, 8, 1024), np.float32)
cache = np.full((1, 37440), 9, np.uint8)
operator.compress(state, np.zeros(1, np.int32), np.full(1, 127, np.int64), np.zeros(1, np.int64), table,
                  np.ones(512, np.float32), np.ones((128, 64), np.float32), slots, cache, 8, 128)
assert (cache[0, :448] == 64).all() and (cache[0, 576:64 * 576] == 9).all(), cache[0, :448]
print(",".join(sorted(sys.modules)))
"""


def run(code: str, *arguments: object, **changes: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **pipes, **changes)  # type: ignore[call-overload, no-any-return]


def output(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def test_importing_brings_in_nothing_of_the_builder_and_no_torch() -> None:
    code = "import sys; import kvbuild.runtime, kvbuild.runtime.select; print(','.join(sorted(sys.modules)))"
    modules = output(run(code)).strip().split(",")
    assert "kvbuild.runtime.bundle" in modules
    assert not [name for name in modules if name in (*FORBIDDEN, "torch", "tvm_ffi")]


def test_the_variable_is_set_before_tvm_ffi_is_imported() -> None:
    code = """
import os, sys
os.environ.pop("TVM_FFI_DISABLE_TORCH_C_DLPACK", None)
sys.modules["torch"] = None
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "tvm_ffi":
            print("variable", os.environ.get("TVM_FFI_DISABLE_TORCH_C_DLPACK"))
sys.meta_path.insert(0, Watch())
import kvbuild.runtime
import tvm_ffi
"""
    assert output(run(code)) == "variable 1\n"


def test_a_choice_of_the_users_stays() -> None:
    code = "import os, kvbuild.runtime; print(os.environ['TVM_FFI_DISABLE_TORCH_C_DLPACK'])"
    environment = {**os.environ, "TVM_FFI_DISABLE_TORCH_C_DLPACK": "0"}
    assert output(run(code, env=environment)) == "0\n"


def test_loading_and_computing_import_nothing_of_the_builder(cpu_bundle: Path) -> None:
    modules = output(run(COMPUTE, cpu_bundle)).strip().split(",")
    assert "tvm_ffi" in modules
    assert not [name for name in modules if name in FORBIDDEN]


def test_sixteen_processes_at_once_on_a_bare_host(cpu_bundle: Path, tmp_path: Path) -> None:
    """No HOME, no folder for temporary files, a working folder and a bundle that may only be read."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    (folder / "compress.kvb").write_bytes(cpu_bundle.read_bytes())
    (folder / "compress.kvb").chmod(0o444)
    folder.chmod(0o555)
    bare = {"PATH": os.defpath, "TMPDIR": str(tmp_path / "absent"), "PYTHONDONTWRITEBYTECODE": "1"}
    processes = [run(COMPUTE, "compress.kvb", cwd=folder, env=bare) for _ in range(16)]
    assert all("tvm_ffi" in output(process) for process in processes)
    assert [path.name for path in folder.iterdir()] == ["compress.kvb"]


@pytest.mark.parametrize("name", ["load", "BundleError", "NoMatchingArtifact", "DeviceError", "KvbuildError"])
def test_the_public_names(name: str) -> None:
    from kvbuild import runtime

    assert name in runtime.__all__ and hasattr(runtime, name)
    if name.endswith(("Error", "Artifact")):
        assert issubclass(getattr(runtime, name), runtime.KvbuildError)
