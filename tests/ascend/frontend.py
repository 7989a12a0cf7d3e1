"""Runs inside the toolchain's own interpreter: Triton source -> the Ascend adapter's linalg IR.

    frontend.py KERNELS_FOLDER OUT_FOLDER < requests

A request, one a line: {"name", "module", "function", "signature": {parameter: type}, "constexprs": {},
"arch"}. OUT_FOLDER/NAME.mlir appears for each; what fails is printed, and the exit status is 1.
"""

import importlib.util
import json
import os
import sys
import tempfile
import types
from typing import Any


def package(kernels: str) -> str:
    """Makes the folder of kernels importable as `kvbuild_unit`, without importing anything else of it."""
    for name, path in (("kvbuild_unit", kernels), ("kvbuild_unit.ascend", os.path.join(kernels, "ascend"))):
        module = types.ModuleType(name)
        module.__path__ = [path]
        sys.modules[name] = module
    return "kvbuild_unit.ascend."


def linalg(request: dict[str, Any], prefix: str) -> str:
    """The linalg IR of one stage: Triton's and the adapter's passes, and no compiler after them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend = triton.backends.backends["ascend"].compiler
    arch = request["arch"]

    class Arch:
        def get_arch(self) -> str:
            return str(arch)

    backend.add_stages.__globals__["NPUUtils"] = Arch
    function = getattr(importlib.import_module(prefix + request["module"]), request["function"])
    source = ASTSource(fn=function, signature=request["signature"], constants=request["constexprs"])
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            triton.compile(source, target=GPUTarget("npu", arch, 0), options={"enable_fp_fusion": False})
        except Exception as error:
            failure = error
        else:
            failure = None
        for root, _, files in os.walk(folder):
            for name in files:
                if name.endswith(".ttadapter"):
                    with open(os.path.join(root, name), encoding="utf-8") as file:
                        return file.read()
    raise failure or RuntimeError("Triton left no linalg IR")


def main() -> int:
    kernels, out = sys.argv[1:]
    prefix = package(kernels)
    failed = 0
    for line in sys.stdin:
        request = json.loads(line)
        try:
            text = linalg(request, prefix)
        except Exception as error:
            print(f"{request['name']}: {type(error).__name__}: {str(error)[:2000]}", flush=True)
            failed += 1
            continue
        with open(os.path.join(out, request["name"] + ".mlir"), "w", encoding="utf-8") as file:
            file.write(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
