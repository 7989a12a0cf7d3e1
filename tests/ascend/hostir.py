"""Lowers a kernel's linalg IR (triton-ascend's `ttadapter`) to a shared object of this host.

The object exports `kvb_run(args, size, blocks)`: it takes the argument block that a launcher packs for the
device (ffts, lock, workspace, the kernel's arguments, the grid), checks its size, and runs every block of the
launch, one after the other. So what runs is Triton's front end and the Ascend adapter's lowering; not
bishengir's, hivmc's or a chip's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hosttools import HostTools

PASSES = (
    "--convert-elementwise-to-linalg", "--eliminate-empty-tensors", "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true", "--convert-linalg-to-loops",
    "--lower-affine", "--arith-expand=include-bf16=true", "--convert-scf-to-cf",
    "--convert-arith-to-llvm", "--convert-math-to-llvm", "--convert-math-to-libm",
    "--convert-complex-to-llvm", "--convert-vector-to-llvm", "--convert-index-to-llvm", "--memref-expand",
    "--expand-strided-metadata", "--lower-affine", "--convert-arith-to-llvm", "--finalize-memref-to-llvm",
    "--convert-func-to-llvm", "--convert-cf-to-llvm", "--reconcile-unrealized-casts",
)  # fmt: skip

C_TYPES = {"i32": "int32_t", "i64": "int64_t", "f32": "float", "ptr": "void *"}
HIDDEN = 2  # lock and workspace come before the kernel's own arguments
GRID = 6  # three extents and three places come after them

SUPPORT = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The lowered kernel frees nothing: what a block allocates goes when the block is done. */
typedef struct chunk { struct chunk *next; } chunk;
static chunk *chunks;

void *kvb_host_alloc(uint64_t size) {
  chunk *made = malloc(sizeof(chunk) + 64 + size);
  if (made == NULL) abort();
  made->next = chunks;
  chunks = made;
  memset(made + 1, 0xff, 64 + size); /* what is read before it is written is a NaN */
  return made + 1;
}

static void release(void) {
  while (chunks != NULL) {
    chunk *next = chunks->next;
    free(chunks);
    chunks = next;
  }
}

/* MLIR's runtime function: copies between strided views of equal shape. */
typedef struct { int64_t rank; void *descriptor; } unranked;

static char *data_of(int64_t *words, int64_t item) { return (char *)words[1] + words[2] * item; }

void memrefCopy(int64_t item, unranked *from, unranked *to) {
  int64_t *a = from->descriptor, *b = to->descriptor, rank = from->rank, total = 1, index[8] = {0};
  const int64_t *extent = a + 3, *in = a + 3 + rank, *out = b + 3 + rank;
  char *source = data_of(a, item), *target = data_of(b, item);
  for (int64_t i = 0; i < rank; ++i) total *= extent[i];
  for (int64_t n = 0; n < total; ++n) {
    int64_t at = 0, to_at = 0;
    for (int64_t i = 0; i < rank; ++i) at += index[i] * in[i], to_at += index[i] * out[i];
    memcpy(target + to_at * item, source + at * item, (size_t)item);
    for (int64_t i = rank - 1; i >= 0 && ++index[i] == extent[i]; --i) index[i] = 0;
  }
}
"""


def entry_of(text: str) -> str:
    """The name of the one function that a kernel's linalg IR exports."""
    names = re.findall(r"func\.func @([A-Za-z0-9_]+)\(", text)
    if len(names) != 1:
        raise ValueError(f"wanted one function in the linalg IR, found {names}")
    return str(names[0])


def arguments_of(text: str) -> list[str]:
    """The kernel's own arguments, each `ptr`, `i32`, `i64` or `f32`; ValueError for any other kind."""
    head = text[text.index("func.func @") :]
    found = re.findall(r"%arg\d+: (memref<\?x[a-z0-9]+>|[a-z0-9]+)", head[: head.index("attributes")])
    kinds = ["ptr" if kind.startswith("memref") else kind for kind in found]
    wrong = [kind for kind in kinds if kind not in C_TYPES]
    if wrong or kinds[:HIDDEN] != ["ptr"] * HIDDEN or kinds[-GRID:] != ["i32"] * GRID:
        raise ValueError(f"wanted lock, workspace, pointers and i32, i64, f32, then six i32; found {found}")
    return kinds[HIDDEN:-GRID]


def trampoline(entry: str, kinds: Sequence[str]) -> str:
    """C that unpacks the launcher's argument block and calls the lowered kernel once a block."""
    members = [f"  {C_TYPES[kind]} a{i};" for i, kind in enumerate(kinds)]

    def memref(name: str) -> str:
        return f"{name}, {name}, 0, INT64_MAX, 1"

    passed = [memref("args.lock"), memref("args.workspace")]
    passed += [memref(f"args.a{i}") if kind == "ptr" else f"args.a{i}" for i, kind in enumerate(kinds)]
    passed += ["args.grid[0]", "args.grid[1]", "args.grid[2]", "x", "y", "z"]
    descriptor = "void *, void *, int64_t, int64_t, int64_t"
    declared = [descriptor] * HIDDEN + [descriptor if kind == "ptr" else C_TYPES[kind] for kind in kinds]
    declared += ["int32_t"] * GRID
    return "\n".join(
        [
            f"void {entry}({', '.join(declared)});",
            "typedef struct {",
            "  void *ffts, *lock, *workspace;",
            *members,
            "  int32_t grid[3];",
            "} block;",
            '__attribute__((visibility("default")))',
            "int kvb_run(const void *given, size_t size, uint32_t n) {",
            "  block args;",
            "  if (size != sizeof args) return -(int)sizeof args;",
            "  memcpy(&args, given, size);",
            "  int32_t gy = args.grid[1], gz = args.grid[2];",
            "  if ((int64_t)args.grid[0] * gy * gz != n) return 1;",
            "  for (uint32_t i = 0; i < n; ++i) {",
            "    int32_t x = (int32_t)i / (gy * gz), y = (int32_t)i / gz % gy, z = (int32_t)i % gz;",
            f"    {entry}({', '.join(passed)});",
            "    release();",
            "  }",
            "  return 0;",
            "}",
            "",
        ]
    )


def lower(tools: HostTools, text: str) -> bytes:
    """The bytes of the host's shared object for one kernel's linalg IR. ValueError where a tool refuses."""
    entry = entry_of(text)
    lowered = tools.run("mlir-opt", *PASSES, given=text.encode())
    ir = tools.run("mlir-translate", "--mlir-to-llvmir", given=lowered).decode()
    ir = ir.replace("@malloc(", "@kvb_host_alloc(")
    code = tools.run("llc", "-O2", "-filetype=obj", "-relocation-model=pic", "-fp-contract=off",
                     given=ir.encode())  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="kvbuild-host-") as name:
        folder = Path(name)
        (folder / "kernel.o").write_bytes(code)
        (folder / "run.c").write_text(SUPPORT + trampoline(entry, arguments_of(text)))
        command = [sys.executable, "-m", "ziglang", "cc", "-O2", "-shared", "-fPIC", "-s", "-g0"]
        command += ["-fno-sanitize=undefined", "-fvisibility=hidden", "-Wall", "-Werror", "run.c", "kernel.o"]
        command += ["-lm", "-o", "kernel.so"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=_zig(folder))
        if done.returncode != 0:
            raise ValueError(f"zig cc: {done.stderr[-2000:]}")
        return (folder / "kernel.so").read_bytes()


def _zig(folder: Path) -> dict[str, str]:
    shared = os.environ.get("ZIG_GLOBAL_CACHE_DIR") or str(folder / "zig")
    return {**os.environ, "ZIG_GLOBAL_CACHE_DIR": shared, "ZIG_LOCAL_CACHE_DIR": str(folder / "local")}
