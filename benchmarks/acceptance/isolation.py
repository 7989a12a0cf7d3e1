"""Hides Triton from this process, and counts whatever compiles in it or by it.

`install` runs before torch is imported. The driver writes a file into its cache for every kernel that it
compiles, so an empty cache of our own is a count that nothing escapes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Libraries that turn source, PTX or LLVM's language into device code.
COMPILER_LIBRARIES = ("libnvrtc", "ptxjitcompiler", "nvptxcompiler", "libnvvm", "libtriton", "libLLVM")


@dataclass
class Isolation:
    """What this process is watched for.

    cache:    an empty folder that the driver would keep compiled kernels in.
    programs: the programs that were started from here.
    """

    cache: Path
    programs: list[str] = field(default_factory=list)

    def compiled_by_driver(self) -> int:
        """How many kernels the driver has put into its cache; the cache's index beside them is none."""
        return sum(1 for path in self.cache.rglob("*") if path.is_file() and path.parent != self.cache)

    def foreign_programs(self) -> list[str]:
        """Programs that were started from here and are not this Python."""
        return [name for name in self.programs if os.path.realpath(name) != os.path.realpath(sys.executable)]


def install() -> Isolation:
    """Makes `import triton` fail from here on, gives the driver an empty cache and watches for programs."""
    loaded = triton_modules()
    if loaded or "torch" in sys.modules:
        found = ", ".join(loaded) or "torch"
        raise RuntimeError(f"wanted to run before torch and triton are imported, found {found}")
    hide_triton()
    folder = tempfile.mkdtemp(prefix="kvbuild-driver-cache-")
    os.environ["CUDA_CACHE_PATH"] = folder
    os.environ.pop("CUDA_CACHE_DISABLE", None)
    isolation = Isolation(Path(folder))

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.exec", "os.posix_spawn"):
            isolation.programs.append(os.fsdecode(arguments[0]))
        elif event == "os.system":
            isolation.programs.append("a shell")

    sys.addaudithook(watch)
    return isolation


def hide_triton() -> None:
    """Makes `import triton` a ModuleNotFoundError; whoever asks first whether it is there hears no."""
    sys.modules["triton"] = None  # type: ignore[assignment]


def triton_modules() -> list[str]:
    """The modules of Triton that this process has imported."""
    return sorted(name for name, module in sys.modules.items()
                  if name.partition(".")[0] == "triton" and module is not None)


def mapped_libraries() -> set[str]:
    """File names of the shared objects mapped into this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if len(line.split(maxsplit=5)) == 6}
    return {os.path.basename(path) for path in paths if ".so" in os.path.basename(path)}


def compiler_libraries(names: set[str]) -> list[str]:
    """Those of the libraries that can compile device code."""
    return sorted(name for name in names if any(part in name for part in COMPILER_LIBRARIES))
