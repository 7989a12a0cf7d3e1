"""Compiles the host kernel as the builder does, and calls it as plain C."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbuild.kernels import cpu
from kvbuild.kernels.contract import OPERANDS
from kvbuild.kernels.oracle import expect
from kvbuild.kernels.verdict import changed_outside, judge
from kvbuild.kernels.workloads import Inputs

HERE = Path(__file__).parent
ARCH = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
LAUNCHER = cpu.FOLDER.parents[1] / "aot" / "launcher"

EXTENTS = (
    "num_blocks", "state_page_stride", "state_row_stride", "block_size", "num_tokens", "num_outputs",
    "num_reqs", "blocks_per_req", "block_table_stride", "max_pos", "cos_sin_stride", "kv_pages",
    "kv_page_stride",
)  # fmt: skip

Compiler = Callable[..., Path]


class Operands(ctypes.Structure):
    """kvb_operands, field by field."""

    _fields_ = (
        *((operand.name, ctypes.c_void_p) for operand in OPERANDS),
        ("scratch", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in EXTENTS),
        ("weight_is_fp32", ctypes.c_int32),
        ("compress_ratio", ctypes.c_int32),
        ("rms_norm_eps", ctypes.c_float),
    )


def pack(x: Inputs) -> Operands:
    state, table, angles, kv = x.state_cache, x.block_table, x.cos_sin_cache, x.kv_cache
    return Operands(
        *(getattr(x, operand.name).data_ptr() for operand in OPERANDS), None,
        state.shape[0], state.stride(0), state.stride(1), x.block_size,
        x.positions.shape[0], x.boundary_token_indices.shape[0],
        table.shape[0], table.shape[1], table.stride(0),
        angles.shape[0], angles.stride(0), kv.shape[0], kv.stride(0),
        x.rms_norm_weight.element_size() == 4, x.compress_ratio, x.rms_norm_eps,
    )  # fmt: skip


class Kernel:
    """One loaded copy of the shared object."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.function = self.library.kvb_cpu_compress
        self.function.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]

    def __call__(self, x: Inputs) -> bytes:
        """Runs in place; the bytes of the storage that kv_cache is a view of."""
        error = ctypes.create_string_buffer(256)
        if self.function(ctypes.byref(pack(x)), error, len(error)) != 0:
            raise ValueError(error.value.decode())
        return ctypes.string_at(x.kv_storage.data_ptr(), x.kv_storage.numel())

    def fresh(self, x: Inputs) -> bytes:
        """The same on a copy of kv_cache."""
        return self(x.fresh())

    def check(self, x: Inputs) -> None:
        """Every byte is the oracle's, or an accepted tie, or unchanged."""
        after = x.fresh()
        self(after)
        verdict = judge(after.kv_cache, x.kv_cache, expect(*x.call_args()))
        assert verdict.right, str(verdict)
        assert changed_outside(after.kv_storage, x.kv_storage, after.kv_cache) == 0


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBUILD_CPU_ISA", raising=False)


@pytest.fixture(scope="session")
def levels() -> tuple[str, ...]:
    """The names of this architecture's instruction set levels, lowest first."""
    return ("baseline", "avx2", "avx512") if ARCH == "x86_64" else ("baseline",)


@pytest.fixture(scope="session")
def compile_c(session_folder: Path) -> Compiler:
    """compile_c(arch, option or name of a C file here, ...): the kernel with these, once a session."""
    folder = session_folder / "host-kernel"
    folder.mkdir(exist_ok=True)

    def compile_(arch: str, *options: str) -> Path:
        more = [str(HERE / option) if option.endswith(".c") else option for option in options]
        sources = [cpu.FOLDER / name for name in cpu.SOURCES]
        headers = [*(cpu.FOLDER / name for name in cpu.HEADERS), LAUNCHER / "operands.h"]
        digest = hashlib.sha256(repr((arch, more)).encode())
        for path in (*sources, *headers, *sorted(HERE.glob("*.c"))):
            digest.update(path.read_bytes())
        made = folder / digest.hexdigest()[:16]
        if made.exists():
            return made
        partial = made.with_suffix(f".{os.getpid()}")
        zig = str(folder / "zig")
        done = subprocess.run(
            [sys.executable, "-m", "ziglang", "cc", "-target", f"{arch}-linux-gnu.2.17", *cpu.FLAGS[arch],
             "-Wall", "-Wextra", "-Werror", "-I", str(LAUNCHER), "-I", str(cpu.FOLDER),
             *map(str, sources), *more, "-o", str(partial)],
            env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": zig, "ZIG_LOCAL_CACHE_DIR": zig},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        partial.rename(made)
        return made

    return compile_


@pytest.fixture(scope="session")
def kernel(compile_c: Compiler) -> Kernel:
    """The kernel, as this process's affinity mask and processor have it."""
    return Kernel(compile_c(ARCH, "-shared"))


@pytest.fixture
def new_copy(compile_c: Compiler, tmp_path: Path) -> Callable[[], Kernel]:
    """Loads the kernel again, with a pool of its own, on a machine of seemingly eight processors."""
    compiled = compile_c(ARCH, "-shared", "eight_processors.c")

    def load() -> Kernel:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.so"
        shutil.copy(compiled, path)
        return Kernel(path)

    return load


@pytest.fixture
def run_program(compile_c: Compiler, tmp_path: Path) -> Callable[..., bytes]:
    """run_program(arch, inputs, *arguments): runs run_from_file.c; the bytes of kv_cache's storage.

    Skips, once it is compiled, where this machine cannot run that architecture.
    """

    def run(arch: str, x: Inputs, *arguments: str) -> bytes:
        options = ("eight_processors.c",) if arguments else ()
        command = [str(compile_c(arch, "run_from_file.c", *options))]
        if arch != ARCH:
            emulator, system = shutil.which(f"qemu-{arch}-static"), Path(f"/usr/{arch}-linux-gnu")
            if emulator is None or not system.is_dir():
                pytest.skip(f"compiled for {arch}; running it needs qemu-user-static and its C library")
            command = [emulator, "-L", str(system), *command]
        tensors = [*(getattr(x, operand.name) for operand in OPERANDS[:-1]), x.kv_storage]
        assert all(tensor.is_contiguous() for tensor in tensors)
        arrays = [ctypes.string_at(t.data_ptr(), t.numel() * t.element_size()) for t in tensors]
        head = bytes(pack(x)) + struct.pack("<10q", *map(len, arrays), x.kv_cache.storage_offset())
        given, found = tmp_path / "operands", tmp_path / "kv"
        given.write_bytes(head + b"".join(arrays))
        command += [str(given), str(found), *arguments]
        done = subprocess.run(command, capture_output=True, timeout=120)
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
        return found.read_bytes()

    return run
