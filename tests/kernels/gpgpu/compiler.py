"""The builder's worker, which also answers with the PTX, as `ptx`.

Reads and answers what else aot/worker.py does. A script, so that Triton is imported in no other process.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

from kvbuild.aot import worker

compile_unit = worker.compile_unit


def keeping_ptx(request: worker.Request, sources: worker.Sources) -> dict[str, Any]:
    import triton

    kept: list[Any] = []
    real = triton.compile

    def compile_(*arguments: Any, **named: Any) -> Any:
        kept.append(real(*arguments, **named))
        return kept[0]

    triton.compile = compile_
    try:
        answer = compile_unit(request, sources)
    finally:
        triton.compile = real
    return {**answer, "ptx": kept[0].asm["ptx"]}


if __name__ == "__main__":
    worker.compile_unit = keeping_ptx
    with tempfile.TemporaryDirectory() as folder, os.fdopen(os.dup(1), "w") as answers:
        worker.serve(sys.stdin, answers, folder)
