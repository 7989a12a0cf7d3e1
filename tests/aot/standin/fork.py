"""Stands in for a vendor's fork of Triton: what the worker asks of it, answered with made-up binaries."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent

# What kernels' sources and the worker touch of Triton, and no more.
_PACKAGE = """
import inspect, os, sys
sys.path.insert(0, {standin!r})
import binaries

__version__ = {version!r}

class Jitted:
    def __init__(self, function):
        self.__name__ = function.__name__
        self.arg_names = list(inspect.signature(function).parameters)

jit = Jitted

class Compiled:
    def __init__(self, metadata, asm):
        self.metadata, self.asm = metadata, asm

class Metadata:
    def __init__(self, **known):
        self.__dict__.update(known)

def compile(source, target, options):
    wanted = {target!r}
    found = (target.backend, target.arch, target.warp_size)
    if found != wanted:
        raise ValueError(f"wanted {{wanted}}, found {{found}}")
    name = source.fn.__name__
    signature = [(each, kind) for each, kind in source.signature.items() if kind != "constexpr"]
    data = binaries.made_up({vendor!r}, name, signature, {hidden!r}, repr((options, source.constants)))
    if {as_path!r}:
        path = os.path.join(os.environ["TRITON_CACHE_DIR"], name + ".bin")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
        data = ("its assembly\\n", path)
    metadata = Metadata(name=name, shared=0, num_warps=options["num_warps"], num_ctas=1)
    return Compiled(metadata, {{"ttir": "module", {binary!r}: data}})
"""
_LANGUAGE = """
class constexpr:
    def __init__(self, value):
        self.value = value

def __getattr__(name):
    return name
"""
_COMPILER = """
class AttrsDescriptor:
    def __init__(self, divisible_by_16, equal_to_1):
        self.divisible_by_16 = divisible_by_16

class ASTSource:
    def __init__(self, fn, signature, attrs, constants=None, constexprs=None):
        self.fn, self.signature, self.attrs = fn, signature, attrs
        self.constants = constants if constants is not None else constexprs
"""
_TARGET = """
class GPUTarget:
    def __init__(self, backend, arch, warp_size):
        self.backend, self.arch, self.warp_size = backend, arch, warp_size
"""


def make(
    folder: Path,
    vendor: str,
    target: tuple[str, int | str, int],
    version: str,
    hidden: int,
    binary: str,
    files: tuple[str, ...],
    as_path: bool = False,
) -> Path:
    """Writes the fork into `folder` and returns the interpreter that has it.

    files: what the vendor's SDK brings, each a program that prints a version, by its path under `folder`.
    as_path: the last stage is a text and a path, as some forks have it.
    """
    package = _PACKAGE.format(
        standin=str(HERE), version=version, target=target, vendor=vendor, hidden=hidden, binary=binary,
        as_path=as_path,
    )  # fmt: skip
    texts = {
        "triton/__init__.py": package, "triton/language/__init__.py": _LANGUAGE,
        "triton/compiler/__init__.py": _COMPILER, "triton/backends/__init__.py": "",
        "triton/backends/compiler.py": _TARGET,
        "python": f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n',
        **dict.fromkeys(files, "#!/bin/sh\necho LLVM version 14.0.6\n"),
    }  # fmt: skip
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return folder / "python"
