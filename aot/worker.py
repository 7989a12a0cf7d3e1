"""Compiles units inside a target's own interpreter: JSON lines in, JSON lines and artifact files out.

Self-contained: runs under Python 3.8 or newer with any Triton 3.x, as a script, with nothing of kvbuild
importable. Its text is part of every unit's key.

A request, one a line: {"id", "sources": {path: text}, "module": path, "function",
"signature": [[name, type]], "constexprs": {name: value}, "divisible_by_16": [name],
"target": [backend, arch, warp size], "options": {}, "environment": {name: text}, "binary": stage,
"triton": version, "output": file}. `{triton}` in an environment text stands for Triton's folder.
An answer: {"id", "ok": true, "entry", "shared", "num_warps", "num_ctas", "global_scratch",
"profile_scratch", "seconds"}, or {"id", "ok": false, "kind", "error"} with the compiler's words.
An artifact appears under its name whole or not at all.

`worker.py --probe` prints {"python", "triton", tool: version ...} and imports no Triton.
"""

# ruff: noqa: UP006, UP035, UP045 - Python 3.8 runs this, and one statement must precede the imports

import os
import sys

if __name__ == "__main__" and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    # A script's own folder comes first on the path; its neighbours must shadow no module of Triton's.
    del sys.path[0]

import hashlib
import importlib
import json
import re
import shutil
import subprocess
import tempfile
import time
from typing import IO, Any, Dict, List, Optional

PACKAGE = "kvbuild_unit"
Request = Dict[str, Any]

# Line info would carry this machine's paths into the binary.
FIXED_ENVIRONMENT = {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_ALWAYS_COMPILE": "1"}


def probe() -> Dict[str, str]:
    """Versions of what compiles here, by tool name. Absent tools are absent."""
    from importlib import metadata

    found = {"python": ".".join(str(part) for part in sys.version_info[:3])}
    try:
        triton = metadata.distribution("triton")
    except metadata.PackageNotFoundError:
        return found
    found["triton"] = triton.version
    for tool in ("ptxas", "ptxas-blackwell"):
        path = str(triton.locate_file("triton/backends/nvidia/bin/" + tool))
        try:
            done = subprocess.run([path, "--version"], stdout=subprocess.PIPE, check=False)
        except OSError:
            continue
        match = re.search(rb"\bV(\d+(?:\.\d+)+)", done.stdout)
        if match:
            found[tool] = match.group(1).decode()
    return found


class Sources:
    """The kernel sources of the requests, each set written once and imported under one fixed package name.

    The name is fixed because it enters the names of device functions; the folder does not.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.current: Optional[str] = None

    def load(self, sources: Dict[str, str], module: str) -> Any:
        digest = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()
        root = os.path.join(self.folder, digest[:16])
        package = os.path.join(root, PACKAGE)
        if not os.path.isdir(root):
            for path, text in sources.items():
                target = os.path.join(package, path)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                with open(target, "w", encoding="utf-8", newline="") as file:
                    file.write(text)
        if self.current != root:
            for name in [n for n in sys.modules if n == PACKAGE or n.startswith(PACKAGE + ".")]:
                del sys.modules[name]
            if self.current in sys.path:
                sys.path.remove(self.current)
            sys.path.insert(0, root)
            importlib.invalidate_caches()
            self.current = root
        name = ".".join([PACKAGE, *module[: -len(".py")].split("/")])
        return importlib.import_module(name)


def ast_source(triton: Any, function: Any, request: Request) -> Any:
    """Triton's ASTSource, whose arguments changed between 3.1, 3.2 and 3.3."""
    constexprs = request["constexprs"]
    aligned = [function.arg_names.index(name) for name in request["divisible_by_16"]]
    runtime = dict(request["signature"])
    compiler = triton.compiler
    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
    if version >= (3, 3):
        signature = {name: runtime.get(name, "constexpr") for name in function.arg_names}
        attrs = {(index,): [["tt.divisibility", 16]] for index in aligned}
        if type(function).__name__ == "GluonJITFunction":
            from triton.experimental.gluon._runtime import GluonASTSource

            return GluonASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=attrs)
        return compiler.ASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=attrs)
    if version >= (3, 2):
        from triton.backends.compiler import AttrsDescriptor

        described = {"tt.divisibility": aligned, "tt.equal_to": []}
        attrs = AttrsDescriptor.from_dict({"arg_properties": described, "cls": "AttrsDescriptor"})
    else:
        attrs = compiler.AttrsDescriptor(divisible_by_16=set(aligned), equal_to_1=set())
    return compiler.ASTSource(fn=function, signature=runtime, constants=constexprs, attrs=attrs)


def compile_unit(request: Request, sources: Sources) -> Dict[str, Any]:
    """Compiles one request, publishes the artifact and returns the metadata of the answer."""
    import triton
    import triton.compiler
    from triton.backends.compiler import GPUTarget

    if triton.__version__ != request["triton"]:
        raise RuntimeError(
            f"wanted triton {request['triton']} as planned, found {triton.__version__} in {sys.executable}"
        )
    folder = os.path.dirname(os.path.abspath(triton.__file__))
    started = time.monotonic()
    changed = {name: text.replace("{triton}", folder) for name, text in request["environment"].items()}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        function = getattr(sources.load(request["sources"], request["module"]), request["function"])
        names = [name for name, _ in request["signature"]] + list(request["constexprs"])
        if list(function.arg_names) != names:
            raise TypeError(
                f"{function.__name__} takes ({', '.join(function.arg_names)}), "
                f"the plan gives ({', '.join(names)})"
            )
        source = ast_source(triton, function, request)
        backend, arch, warp_size = request["target"]
        compiled = triton.compile(
            source, target=GPUTarget(backend, arch, warp_size), options=dict(request["options"])
        )
    finally:
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text
    metadata = compiled.metadata
    publish(compiled.asm[request["binary"]], request["output"])
    return {
        "entry": metadata.name,
        "shared": metadata.shared,
        "num_warps": metadata.num_warps,
        "num_ctas": getattr(metadata, "num_ctas", 1),
        # Before Triton 3.3 and 3.5 there was no such scratch, and no parameter for it.
        "global_scratch": getattr(metadata, "global_scratch_size", 0) or 0,
        "profile_scratch": getattr(metadata, "profile_scratch_size", 0) or 0,
        "seconds": round(time.monotonic() - started, 3),
    }


def publish(data: bytes, path: str) -> None:
    """Writes bytes under a temporary name, to the disk, and only then under `path`."""
    with open(path + ".part", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


def words(error: Optional[BaseException]) -> str:
    """An exception's own text and those it was raised from, without tracebacks."""
    texts: List[str] = []
    while error is not None:
        text = f"{type(error).__name__}: {error}".strip()
        if text not in texts:
            texts.append(text)
        error = error.__cause__
    return "\n".join(texts)


def capture(log: IO[bytes]) -> str:
    """The text that compilers wrote to stdout and stderr since the last call, and a fresh start."""
    sys.stdout.flush()
    sys.stderr.flush()
    log.seek(0)
    text = log.read().decode("utf-8", "replace")
    log.seek(0)
    log.truncate()
    return text


def serve(requests: IO[str], answers: IO[str], folder: str) -> None:
    """Answers each request line until the input ends."""
    os.environ.update(FIXED_ENVIRONMENT)
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
    sys.dont_write_bytecode = True
    sources = Sources(os.path.join(folder, "sources"))
    with tempfile.TemporaryFile(dir=folder) as log:
        # Triton and its tools print: both streams go to the log, the answers to a private descriptor.
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        for line in requests:
            request = json.loads(line)
            try:
                answer = {"ok": True, **compile_unit(request, sources)}
            except Exception as error:
                answer = {"ok": False, "kind": type(error).__name__, "error": words(error)}
                printed = capture(log).strip()
                if printed and not isinstance(error, (ImportError, TypeError)):
                    answer["error"] += "\n" + printed[-4000:]
            else:
                capture(log)
            shutil.rmtree(os.environ["TRITON_CACHE_DIR"], ignore_errors=True)
            answers.write(json.dumps({"id": request["id"], **answer}) + "\n")
            answers.flush()


def main() -> None:
    if sys.argv[1:] == ["--probe"]:
        print(json.dumps(probe()))
        return
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    folder = tempfile.mkdtemp(prefix="kvbuild-")
    try:
        serve(requests, answers, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
