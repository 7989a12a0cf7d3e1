"""The host kernel, compiled here and called as plain C, against the oracle."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvbuild.kernels import cpu, reference
from kvbuild.kernels.contract import COMPRESS_RATIOS, HEAD_DIM, OPERANDS
from kvbuild.kernels.oracle import expect
from kvbuild.kernels.verdict import changed_outside, judge, tie_refusals
from kvbuild.kernels.workloads import WORKLOADS, Inputs, Workload, make

ARCH = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
LAUNCHER = Path(cpu.FOLDER).parents[1] / "aot" / "launcher"
LEVELS = ("baseline", "avx2", "avx512") if ARCH == "x86_64" else ("baseline",)

EXTENTS = ("num_blocks", "state_page_stride", "state_row_stride", "block_size", "num_tokens", "num_outputs", "num_reqs",
           "blocks_per_req", "block_table_stride", "max_pos", "cos_sin_stride", "kv_pages", "kv_page_stride")  # fmt: skip

# Linked into a copy of the kernel, it stands before libc's function of that name: eight processors.
EIGHT_PROCESSORS = """
#define _GNU_SOURCE
#include <sched.h>
__attribute__((visibility("hidden"))) int sched_getaffinity(pid_t process, size_t size, cpu_set_t *mask) {
  (void)process;
  CPU_ZERO_S(size, mask);
  for (int i = 0; i < 8; ++i) CPU_SET_S(i, size, mask);
  return 0;
}
"""

# Reads the struct and its nine arrays, runs the kernel, writes kv_cache's memory.
RUN_FROM_FILE = """
#include <stdio.h>
#include <stdlib.h>
#include "compress.h"
int main(int argc, char **argv) {
  kvb_operands ops;
  int64_t sizes[9], kv_offset;
  char *arrays[9], error[256];
  FILE *in = fopen(argv[1], "rb"), *out = fopen(argv[2], "wb");
  if (argc != 3 || !in || !out) return 2;
  if (fread(&ops, sizeof ops, 1, in) != 1 || fread(sizes, sizeof sizes, 1, in) != 1) return 2;
  if (fread(&kv_offset, sizeof kv_offset, 1, in) != 1) return 2;
  for (int i = 0; i < 9; ++i) {
    arrays[i] = malloc(sizes[i] + 1);
    if (fread(arrays[i], 1, sizes[i], in) != (size_t)sizes[i]) return 2;
    ((void **)&ops)[i] = arrays[i];
  }
  ops.kv_cache += kv_offset;
  if (kvb_cpu_compress(&ops, error, sizeof error)) return puts(error), 1;
  return fwrite(arrays[8], 1, sizes[8], out) != (size_t)sizes[8] || fclose(out);
}
"""


class Operands(ctypes.Structure):
    """kvb_operands, field by field."""

    _fields_ = (
        [(operand.name, ctypes.c_void_p) for operand in OPERANDS] + [("scratch", ctypes.c_void_p)]
        + [(name, ctypes.c_int64) for name in EXTENTS]
        + [("weight_is_fp32", ctypes.c_int32), ("compress_ratio", ctypes.c_int32), ("rms_norm_eps", ctypes.c_float)]
    )  # fmt: skip


def pack(x: Inputs) -> Operands:
    extents = (*x.state_cache.shape[:1], *x.state_cache.stride()[:2], x.block_size, x.positions.shape[0],
               x.boundary_token_indices.shape[0], *x.block_table.shape, x.block_table.stride(0),
               x.cos_sin_cache.shape[0], x.cos_sin_cache.stride(0), x.kv_cache.shape[0], x.kv_cache.stride(0))  # fmt: skip
    return Operands(*(getattr(x, operand.name).data_ptr() for operand in OPERANDS), None, *extents,
                    x.rms_norm_weight.dtype == torch.float32, x.compress_ratio, x.rms_norm_eps)  # fmt: skip


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
        return self(x.fresh())


Compiler = Callable[..., Path]


@pytest.fixture(scope="session")
def compile_c(session_folder: Path) -> Compiler:
    """compile_c(arch, *options, extra=C source): the kernel, compiled once a session for each choice."""
    folder = session_folder / "host-kernel"
    folder.mkdir(exist_ok=True)

    def compile_(arch: str, *options: str, extra: str = "") -> Path:
        digest = hashlib.sha256("\0".join((arch, *options, extra)).encode())
        sources = [cpu.FOLDER / name for name in cpu.SOURCES]
        for path in (*sources, *(cpu.FOLDER / name for name in cpu.HEADERS), LAUNCHER / "operands.h"):
            digest.update(path.read_bytes())
        made = folder / digest.hexdigest()[:16]
        if made.exists():
            return made
        extra_file = made.with_suffix(f".{os.getpid()}.c")
        extra_file.write_text(extra or "typedef int nothing;\n")
        partial = made.with_suffix(f".{os.getpid()}")
        environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(folder / "zig"),
                       "ZIG_LOCAL_CACHE_DIR": str(folder / "zig")}  # fmt: skip
        command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{arch}-linux-gnu.2.17", *cpu.FLAGS[arch],
                   "-Wall", "-Wextra", "-Werror", "-I", str(LAUNCHER), "-I", str(cpu.FOLDER), *map(str, sources),
                   str(extra_file), *options, "-o", str(partial)]  # fmt: skip
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        partial.rename(made)
        return made

    return compile_


@pytest.fixture(scope="session")
def kernel(compile_c: Compiler) -> Kernel:
    return Kernel(compile_c(ARCH, "-shared"))


@pytest.fixture
def new_copy(compile_c: Compiler, tmp_path: Path) -> Iterator[Callable[[], Kernel]]:
    """Loads the kernel again, with a pool of its own, on a machine of seemingly eight processors."""
    loaded: list[Kernel] = []

    def load() -> Kernel:
        path = tmp_path / f"{len(loaded)}.so"
        shutil.copy(compile_c(ARCH, "-shared", extra=EIGHT_PROCESSORS), path)
        loaded.append(Kernel(path))
        return loaded[-1]

    yield load


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBUILD_CPU_ISA", raising=False)


def check(kernel: Kernel, x: Inputs) -> None:
    """Every byte is the oracle's, or an accepted tie, or unchanged."""
    after = x.fresh()
    kernel(after)
    verdict = judge(after.kv_cache, x.kv_cache, expect(*x.call_args()))
    assert verdict.right, str(verdict)
    assert changed_outside(after.kv_storage, x.kv_storage, after.kv_cache) == 0


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


# ---- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS[:3], ids=lambda w: w.name)
def test_smallest_workloads(kernel: Kernel, workload: Workload) -> None:
    x = make(workload)
    after, beside = x.fresh(), x.fresh()
    kernel(after)
    reference.compress(*beside.call_args())
    oracle = expect(*x.call_args())
    verdict = judge(after.kv_cache, x.kv_cache, oracle)
    assert verdict.right and verdict.passes_challenge, str(verdict)
    ties_of_reference = judge(beside.kv_cache, x.kv_cache, oracle).ties
    refusals = tie_refusals(verdict.ties, max(verdict.bytes_compared, 10_000 * 9), ties_of_reference)
    assert not refusals, refusals


@pytest.mark.parametrize("outputs", (0, 1, 3, 8))
def test_decode_steps_with_padding(kernel: Kernel, outputs: int) -> None:
    check(kernel, make(Workload.decode(outputs, 256)))


NONSENSE = (-(2**63), -(2**31) - 1, -513, -1, 2**20, 2**31, 2**31 + 7, 2**62, 2**63 - 1)


@st.composite
def launches(draw: st.DrawFn) -> Inputs:
    """Small launches of any layout, some of whose indices make no sense."""
    ratio = draw(st.sampled_from(COMPRESS_RATIOS))
    num_reqs, windows = draw(st.sampled_from(((1, 1), (1, 2), (2, 1), (3, 1))))
    x = make(
        Workload(num_reqs, num_reqs * windows * ratio, ratio),
        seed=draw(st.integers(0, 2**31)),
        page_pad=draw(st.sampled_from((0, 16, 5))),
        row_pad=draw(st.sampled_from((0, 8, 1))),
        kv_page_stride=draw(st.sampled_from((37376, 37378, 37440))),
        kv_columns=37376,
        block_size=draw(st.sampled_from((1, 2, 3, 7, 8, 16, 64, 100, 513, 1000))),
        padding=draw(st.integers(0, 3)),
        weight_dtype=draw(st.sampled_from((torch.bfloat16, torch.float32))),
    )
    boundaries, n = x.boundary_token_indices, num_reqs * windows
    for output in range(n):
        token = int(boundaries[output])
        match draw(st.sampled_from(("as is", "as is", "shift", "boundary", "request", "position", "slot", "table"))):
            case "shift":  # partly masked windows, or past the end of the table
                x.positions[token] += draw(st.integers(-ratio + 1, 3 * ratio))
            case "boundary":
                boundaries[output] = draw(st.sampled_from((x.positions.shape[0], *NONSENSE)))
            case "request":
                x.token_to_req[token] = draw(st.sampled_from((num_reqs, -1, -(2**31), 2**31 - 1)))
            case "position":
                x.positions[token] = draw(st.sampled_from(NONSENSE))
            case "slot":
                x.kv_slot_mapping[token] = draw(st.sampled_from((x.kv_cache.shape[0] * 64, *NONSENSE)))
            case "table":
                columns = x.block_table.shape[1]
                first = draw(st.integers(0, columns - 1))
                last = draw(st.integers(first + 1, columns))
                bad = (-1, x.state_cache.shape[0], -(2**31), 2**31 - 1)
                x.block_table[:, first:last] = draw(st.sampled_from(bad))
    if draw(st.booleans()):  # a table and a cosine cache with rows further apart, an odd half-word address
        wide = torch.full((x.block_table.shape[0], x.block_table.shape[1] + 3), 7, dtype=torch.int32)
        wide[:, :-3] = x.block_table
        angles = torch.full((x.cos_sin_cache.shape[0], 70), torch.nan)
        angles[:, :64] = x.cos_sin_cache
        moved = x.kv_storage.as_strided(x.kv_cache.shape, x.kv_cache.stride(), x.kv_cache.storage_offset() + 2)
        x = replace(x, block_table=wide[:, :-3], cos_sin_cache=angles[:, :64], kv_cache=moved)
    return x


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(x=launches())
def test_any_launch(kernel: Kernel, x: Inputs) -> None:
    check(kernel, x)


@pytest.mark.parametrize("scale", (0.0, 1e-3, 40.0, 1e30))
def test_any_size_of_scores(kernel: Kernel, scale: float) -> None:
    x = make(Workload(1, 256, 128), seed=3)
    x.state_cache[..., HEAD_DIM:] *= scale
    check(kernel, x)


def test_tiny_weights_still_count(kernel: Kernel) -> None:
    x = make(Workload(1, 128, 128), seed=4)
    x.state_cache[..., HEAD_DIM:] = -80.0
    x.state_cache[int(x.block_table[0, 0]), 0, :HEAD_DIM] = 0.0
    x.state_cache[int(x.block_table[0, 0]), 0, HEAD_DIM:] = 0.0
    oracle = expect(*x.call_args())
    assert bool(oracle.specified.all()) and 0.0 < float(oracle.rope.abs().max()) < 1e-28
    check(kernel, x)


def test_minus_infinity_weighs_nothing(kernel: Kernel) -> None:
    x = make(Workload(1, 384, 128), seed=5)
    scores = x.state_cache[..., HEAD_DIM:]
    scores[torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)) < 0.7] = -torch.inf
    scores[..., 0] = -torch.inf  # all but one row a window
    for page in (int(x.block_table[0, column]) for column in range(3, x.block_table.shape[1], 16)):
        scores[page, 2, 0] = -5.0
    assert bool(expect(*x.call_args()).specified.all())
    check(kernel, x)


@pytest.mark.parametrize("poison", (torch.nan, torch.inf))
def test_poison_stays_in_its_output(kernel: Kernel, poison: float) -> None:
    x = make(Workload(1, 512, 128), seed=6)
    page = int(x.block_table[0, 20])  # in the second window
    for half in (slice(0, HEAD_DIM), slice(HEAD_DIM, None)):
        y = x.with_(state_cache=x.state_cache.clone())
        y.state_cache[page, 3, half] = poison
        assert expect(*y.call_args()).specified.tolist() == [True, False, True, True]
        check(kernel, y)


# ---- one order of summation -----------------------------------------------------------------------


@pytest.mark.parametrize("ratio", COMPRESS_RATIOS)
def test_every_level_gives_the_same_bytes(kernel: Kernel, ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = make(Workload(2, 8 * ratio, ratio), seed=7)
    x.state_cache[::3, :, HEAD_DIM:] *= 30.0  # weights of 0 among them
    found = set()
    for level in LEVELS:
        monkeypatch.setenv("KVBUILD_CPU_ISA", level)
        found.add(kernel.fresh(x))
    assert len(found) == 1


@pytest.mark.parametrize("ratio", COMPRESS_RATIOS)
def test_every_thread_count_gives_the_same_bytes(
    new_copy: Callable[[], Kernel], ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, one = make(Workload(1, 11 * ratio, ratio), seed=8), make(Workload(1, ratio, ratio), seed=9)
    kernel, found, before = new_copy(), set(), num_threads()
    for threads in (1, 2, 3, 8):
        monkeypatch.setenv("KVBUILD_NUM_THREADS", str(threads))
        found.add((kernel.fresh(many), kernel.fresh(one)))
        assert num_threads() == before + threads - 1
    assert len(found) == 1


def test_an_output_has_the_same_bytes_alone_and_in_a_batch(kernel: Kernel) -> None:
    x = make(Workload(1, 300 * 128, 128), seed=10, padding=0)
    whole = x.fresh()
    kernel(whole)
    apart = x.fresh()
    for output in range(0, 300, 7):
        kernel(apart.with_(boundary_token_indices=x.boundary_token_indices[output:output + 1].clone()))
    few = x.with_(boundary_token_indices=x.boundary_token_indices[::7].clone())
    assert kernel(apart) == kernel(whole)
    verdict = judge(whole.kv_cache, x.kv_cache, expect(*x.call_args()))
    assert verdict.outputs == 300 and verdict.right
    after = few.fresh()
    kernel(after)
    slots = x.kv_slot_mapping[few.boundary_token_indices]
    for page, place in zip((slots // 64).tolist(), (slots % 64).tolist(), strict=True):
        payload, scales = slice(576 * place, 576 * place + 576), slice(36864 + 8 * place, 36872 + 8 * place)
        assert torch.equal(after.kv_cache[page, payload], whole.kv_cache[page, payload])
        assert torch.equal(after.kv_cache[page, scales], whole.kv_cache[page, scales])


def test_bytes_do_not_depend_on_where_the_rows_lie(kernel: Kernel) -> None:
    x = make(Workload(1, 1024, 512), seed=11, shuffle_blocks=False)
    rows = x.state_cache[:128].reshape(1024, 2 * HEAD_DIM)
    order = torch.randperm(205, generator=torch.Generator().manual_seed(2))
    pages = torch.full((205, 5, 2 * HEAD_DIM + 3), torch.nan)
    for column, page in enumerate(order.tolist()):
        part = rows[5 * column:5 * column + 5]
        pages[page, :part.shape[0], :2 * HEAD_DIM] = part
    moved = x.with_(state_cache=pages[..., :2 * HEAD_DIM], block_size=5, block_table=order[None].to(torch.int32))
    assert kernel.fresh(moved) == kernel.fresh(x)


def test_the_callers_float_mode_changes_nothing(kernel: Kernel) -> None:
    x = make(Workload(1, 256, 128), seed=12)
    x.state_cache[..., HEAD_DIM:] *= 40.0
    wanted = kernel.fresh(x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no mode that flushes subnormals")
    try:
        assert kernel.fresh(x) == wanted
        assert float(torch.tensor(1e-39) * 1.0) == 0.0, "the caller's own mode was not restored"
    finally:
        torch.set_flush_denormal(False)


# ---- threads and processes ------------------------------------------------------------------------


def test_many_callers_at_once(new_copy: Callable[[], Kernel]) -> None:
    kernel = new_copy()
    launches = [make(Workload(1, windows * 128, 128), seed=windows) for windows in (1, 2, 3, 5, 8, 20, 1, 2)]
    wanted = [kernel.fresh(x) for x in launches]
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(20):
            if kernel.fresh(launches[i]) != wanted[i]:
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(launches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_has_its_own_threads(new_copy: Callable[[], Kernel]) -> None:
    x = make(Workload(1, 1024, 128), seed=13)
    kernel = new_copy()
    wanted, in_child = kernel.fresh(x), x.fresh()
    for _ in range(2):
        child = os.fork()
        if child == 0:
            right = num_threads() == 1 and kernel(in_child) == wanted and num_threads() == 8
            os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert kernel.fresh(x) == wanted


def test_unloading_leaves_no_thread(new_copy: Callable[[], Kernel]) -> None:
    import _ctypes

    x, before = make(Workload(1, 1024, 128), seed=14), num_threads()
    kernel = new_copy()
    kernel.fresh(x)
    assert num_threads() == before + 7
    _ctypes.dlclose(kernel.library._handle)
    assert num_threads() == before


def test_a_process_may_end_during_a_call(compile_c: Compiler, tmp_path: Path) -> None:
    x = make(Workload(1, 2048, 128), seed=15)
    library = compile_c(ARCH, "-shared", extra=EIGHT_PROCESSORS)
    blob, out = tmp_path / "operands", tmp_path / "kv"
    write_case(blob, x)
    script = (
        "import ctypes, sys, threading, time\n"
        "function = ctypes.CDLL(sys.argv[1]).kvb_cpu_compress\n"
        "data = open(sys.argv[2], 'rb').read()\n"
        f"size = {ctypes.sizeof(Operands)}\n"
        "sizes = [int.from_bytes(data[size + 8 * i:size + 8 * i + 8], 'little') for i in range(10)]\n"
        "ops, at, arrays = ctypes.create_string_buffer(data[:size], size), size + 80, []\n"
        "for i, length in enumerate(sizes[:9]):\n"
        "    arrays.append(ctypes.create_string_buffer(data[at:at + length], length))\n"
        "    at += length\n"
        "    address = ctypes.addressof(arrays[-1]) + (sizes[9] if i == 8 else 0)\n"
        "    ctypes.memmove(ctypes.addressof(ops) + 8 * i, address.to_bytes(8, 'little'), 8)\n"
        "def call():\n"
        "    error = ctypes.create_string_buffer(256)\n"
        "    while True:\n"
        "        assert function(ops, error, 256) == 0\n"
        "for _ in range(3):\n"
        "    threading.Thread(target=call, daemon=True).start()\n"
        "time.sleep(0.2)\n"
        f"open({str(out)!r}, 'wb').write(arrays[8].raw)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(library), str(blob)], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(out.read_bytes()) == x.kv_storage.numel()


# ---- the environment and refusals -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("KVBUILD_CPU_ISA", "sse9", "baseline"),
        *(("KVBUILD_NUM_THREADS", value, "whole number from 1") for value in ("0", "-2", "two", "2x", " 2", "1e3", "9" * 30)),
    ],
)
def test_a_wrong_setting_is_named(
    kernel: Kernel, name: str, value: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    x = make(Workload.decode(0, 128))
    with pytest.raises(ValueError) as caught:
        kernel(x)
    assert all(word in str(caught.value) for word in (name, wanted, f"'{value}'", "unset it"))
    monkeypatch.setenv(name, "")
    kernel(x)


def test_a_level_that_the_processor_lacks_is_not_used(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    x = make(Workload(1, 128, 128))
    wanted = kernel.fresh(x)
    monkeypatch.setenv("KVBUILD_CPU_ISA", LEVELS[-1])
    assert kernel.fresh(x) == wanted


def test_other_ratios_and_page_sizes_are_refused(kernel: Kernel) -> None:
    x = make(Workload.decode(1, 128))
    with pytest.raises(ValueError, match="compress_ratio: wanted 128, 256 or 512, found 64"):
        kernel(x.with_(compress_ratio=64))
    with pytest.raises(ValueError, match="block_size: wanted at least 1, found 0"):
        kernel(x.with_(block_size=0))


# ---- the other architecture -----------------------------------------------------------------------


def write_case(path: Path, x: Inputs) -> None:
    """The struct, nine sizes, kv_cache's offset, nine arrays: what RUN_FROM_FILE reads."""
    tensors: list[Any] = [getattr(x, operand.name) for operand in OPERANDS[:-1]]
    assert all(tensor.is_contiguous() for tensor in tensors)
    arrays = [ctypes.string_at(t.data_ptr(), t.numel() * t.element_size()) for t in (*tensors, x.kv_storage)]
    head = bytes(pack(x)) + struct.pack("<10q", *map(len, arrays), x.kv_cache.storage_offset())
    path.write_bytes(head + b"".join(arrays))


def test_aarch64_gives_the_same_bytes(kernel: Kernel, compile_c: Compiler, tmp_path: Path) -> None:
    program = compile_c("aarch64", extra=RUN_FROM_FILE)
    x = make(Workload(1, 512, 256), seed=16, padding=2)
    x.state_cache[::3, :, HEAD_DIM:] *= 30.0
    write_case(tmp_path / "operands", x)
    command = [str(program), str(tmp_path / "operands"), str(tmp_path / "kv")]
    if ARCH != "aarch64":
        emulator, system = shutil.which("qemu-aarch64-static"), Path("/usr/aarch64-linux-gnu")
        if emulator is None or not system.is_dir():
            pytest.skip("compiled; not run: needs qemu-user-static and libc6-arm64-cross")
        command = [emulator, "-L", str(system), *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "kv").read_bytes() == kernel.fresh(x)
