"""The builder's worker, which also keeps the PTX: beside each artifact, under its name and `.ptx`.

Reads and answers what aot/worker.py does. A script, so that Triton is imported in no other process.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
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
    Path(request["output"] + ".ptx").write_text(kept[0].asm["ptx"])
    return answer


if __name__ == "__main__":
    worker.compile_unit = keeping_ptx
    with tempfile.TemporaryDirectory() as folder, os.fdopen(os.dup(1), "w") as answers:
        worker.serve(sys.stdin, answers, folder)
