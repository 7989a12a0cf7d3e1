"""Runs the Ascend stages under Triton's interpreter: a script, so that no other process is affected.

A request: the stages as (file, function, programs, constants, arguments), an argument being (field, type);
the file is None for CANN's gather. Then the memory by field. An answer: ("done", memory) or ("error", text).
Both are torch.save's bytes after their length, a little-endian int64.

Every address that a stage reads or writes is compared with the memory it was given.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import os
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

GPGPU = Path(__file__).parents[1] / "gpgpu" / "interpreter.py"


def shared() -> Any:
    """The GPGPU route's script: its guard and its typed arguments."""
    spec = importlib.util.spec_from_file_location("gpgpu_interpreter", GPGPU)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gather(memory: dict[str, Any]) -> None:
    """What aclnnIndexSelect does; an index outside the rows is an error there too."""
    state = memory["state_cache"]
    rows = torch.as_strided(state, (state.shape[0] * state.shape[1], state.shape[2]), (state.shape[2], 1))
    torch.index_select(rows, 0, memory["rows"], out=memory["gathered"])


def run(stages: list[Any], memory: dict[str, Any], guard: Any, typed: Any) -> None:
    for file, function, programs, constants, arguments in stages:
        if file is None:
            gather(memory)
            continue
        module = importlib.import_module(f"kvbuild.kernels.ascend.{file.removesuffix('.py')}")
        # A stage reaches what it is given, and nothing else.
        given = [memory[field] for field, _ in arguments]
        guard.allow([value for value in given if isinstance(value, torch.Tensor)])
        values = [typed(value, kind) for value, (_, kind) in zip(given, arguments, strict=True)]
        getattr(module, function)[(programs,)](*values, **constants)


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    gpgpu = shared()
    guard = gpgpu.Guard(interpreter._interpreter)
    interpreter._interpreter = guard
    interpreter._LangPatchScope.restore = lambda self: None
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    assert tl
    while head := requests.read(8):
        data = io.BytesIO(requests.read(struct.unpack("<q", head)[0]))
        stages, memory, maker = torch.load(data, weights_only=False)
        if maker is not None:
            from kvbuild.kernels import odd_cases

            memory["state_cache"] = getattr(odd_cases, maker)().state_cache
        try:
            run(stages, memory, guard, gpgpu.typed)
            memory["state_cache"] = None
            answer: tuple[Any, ...] = ("done", memory)
        except Exception as error:
            answer = ("error", f"{type(error).__name__}: {error}")
        out = io.BytesIO()
        torch.save(answer, out)
        answers.write(struct.pack("<q", out.tell()) + out.getvalue())
        answers.flush()


if __name__ == "__main__":
    # What the interpreter prints must not reach the answers.
    with os.fdopen(os.dup(1), "wb") as pipe:
        os.dup2(2, 1)
        main(sys.stdin.buffer, pipe)
