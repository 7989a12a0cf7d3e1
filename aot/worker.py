"""Compiles units inside a target's own interpreter: JSON lines in, JSON lines out.

Self-contained: runs under Python 3.8 or newer with any Triton 3.x, with nothing of kvbuild importable and no
file of the builder's in sight, for that interpreter may be in a container. The builder starts it as
`PYTHON -c "exec(input())"` and sends as the first line of input a statement that executes this text; all that
follows goes through the same pipe, binaries included. This text is part of every unit's key.

A request, one a line: {"id", "sources": {path: text}, "module": path, "function",
"signature": [[name, type]], "constexprs": {name: value}, "divisible_by_16": [name],
"target": [backend, arch, warp size], "options": {}, "environment": {name: text}, "binary": stage,
"triton": version}. `{triton}` in an environment text stands for Triton's folder.
An answer: {"id", "ok": true, "binary": base64, "entry", "shared", "num_warps", "num_ctas", "global_scratch",
"profile_scratch", "seconds"}, or {"id", "ok": false, "kind", "error"} with the compiler's words.

With the argument --probe it reads one line, {tool: {"paths", "arguments", "pattern"}} as targets.Tool says,
prints {"python", "triton", tool: version ...} without those that are not there, and imports no Triton.
"""

# ruff: noqa: UP006, UP035, UP045 - Python 3.8 runs this, and one statement must precede the imports

import os
import sys

if __name__ == "__main__" and sys.path[:1] == [""]:
    # The current folder, which is the builder's: what lies there must shadow no module of Triton's.
    del sys.path[0]

import base64
import contextlib
import hashlib
import importlib
import importlib.util
import json
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from typing import IO, Any, Dict, List, Optional, Tuple

PACKAGE = "kvbuild_unit"
Request = Dict[str, Any]

# Line info would carry this machine's paths into the binary.
FIXED_ENVIRONMENT = {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_ALWAYS_COMPILE": "1"}


TOOL_LIMIT_S = 20
TOOL_WORDS = 1 << 16


def probe(tools: Dict[str, Any]) -> Dict[str, str]:
    """Versions of what compiles here, by tool name. Absent tools are absent."""
    found = {"python": ".".join(str(part) for part in sys.version_info[:3])}
    triton = installed_triton()
    if triton is not None:
        found["triton"] = triton[1]
    for name, tool in tools.items():
        for path in tool["paths"]:
            version = tool_version(located(path, triton[0] if triton else None), tool)
            if version:
                found[name] = version
                break
    return found


def installed_triton() -> Optional[Tuple[str, str]]:
    """Triton's folder and the version that the module itself will give, without importing it."""
    try:
        found = importlib.util.find_spec("triton")
    except (ImportError, ValueError):
        return None
    if found is None or not found.origin:
        return None
    try:
        with open(found.origin, encoding="utf-8", errors="replace") as file:
            match = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", file.read(), re.MULTILINE)
    except OSError:
        return None
    return (os.path.dirname(found.origin), match.group(1)) if match else None


def located(path: str, triton: Optional[str]) -> Optional[str]:
    """The file or folder that a tool's path means here; None where there is none."""
    if "{triton}" in path:
        if triton is None:
            return None
        path = path.replace("{triton}", triton)
    path = os.path.expandvars(path)
    if "$" in path:
        return None
    if os.sep not in path:
        return shutil.which(path)
    return path if os.path.exists(path) else None


def tool_version(path: Optional[str], tool: Dict[str, Any]) -> Optional[str]:
    """The version that a tool prints, or `present` where it is not asked; None where it is not there."""
    if path is None:
        return None
    if not tool["arguments"]:
        return "present"
    match = re.search(tool["pattern"], said_by([path, *tool["arguments"]]))
    return match.group(1) if match else None


def said_by(command: List[str]) -> str:
    """The first that a tool prints; all that it started is ended after TOOL_LIMIT_S, or once it has ended."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError):
        return ""

    def end() -> None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)

    late = threading.Timer(TOOL_LIMIT_S, end)
    late.start()
    try:
        with process.stdout as stream:  # type: ignore[union-attr]
            return stream.read(TOOL_WORDS).decode("utf-8", "replace")
    finally:
        late.cancel()
        end()
        process.wait()


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
    """Compiles one request: the binary and the metadata of the answer."""
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
        if backend == "npu":
            end_in_hivm(triton)
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
    return {
        "binary": base64.b64encode(content(compiled.asm, request["binary"])).decode(),
        "entry": metadata.name,
        "shared": metadata.shared,
        "num_warps": metadata.num_warps,
        "num_ctas": getattr(metadata, "num_ctas", 1),
        # Before Triton 3.3 and 3.5 there was no such scratch, and no parameter for it.
        "global_scratch": getattr(metadata, "global_scratch_size", 0) or 0,
        "profile_scratch": getattr(metadata, "profile_scratch_size", 0) or 0,
        "seconds": round(time.monotonic() - started, 3),
    }


def end_in_hivm(triton: Any) -> None:
    """Makes the last stage of Triton's Ascend backend give bishengir's memory-planned HIVM.

    Its own wants CANN's hivmc, which lowers exactly this text to the chip's code.
    """
    backend = triton.backends.backends["ascend"].compiler
    if backend.add_stages.__name__ == "stages_to_hivm":
        return
    original = backend.add_stages
    parse = original.__globals__["_parse_linalg_metadata"]

    def stages_to_hivm(self: Any, stages: Dict[str, Any], options: Any) -> None:
        original(self, stages, options)
        stages["npubin"] = lambda linalg, metadata: hivm(parse(linalg, metadata)[0], metadata, options)

    backend.add_stages = stages_to_hivm


def hivm(linalg: str, metadata: Dict[str, Any], options: Any) -> bytes:
    """Runs bishengir-compile, which $KVBUILD_BISHENGIR names, on linalg text."""
    with tempfile.TemporaryDirectory() as folder:
        source, kept = os.path.join(folder, "kernel.ttadapter.mlir"), os.path.join(folder, "kept")
        with open(source, "w", encoding="utf-8") as file:
            file.write(linalg)
        command = [
            os.environ["KVBUILD_BISHENGIR"], source, "--target=" + metadata["target"].arch,
            "--enable-auto-multi-buffer=" + str(options.multibuffer),
            "--enable-auto-bind-sub-block=" + str(options.enable_auto_bind_sub_block),
            "--enable-hfusion-compile=true", "--enable-hivm-compile=true",
            "--enable-triton-kernel-compile=true", "--save-temps=" + kept,
            "-o", os.path.join(folder, "kernel"),
        ]  # fmt: skip
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        said = done.stdout.decode("utf-8", "replace").replace(folder + os.sep, "")
        try:
            with open(os.path.join(kept, "module.hivm.opt.mlir"), "rb") as file:
                return file.read()
        except OSError:
            # It tries several times, each with fewer buffers: the last words count.
            over = re.findall(r"ub overflow, requires (\d+) bits while (\d+) bits available", said)
            if over:
                needed, most = (int(bits) // 8 for bits in over[-1])
                text = (
                    f"unified buffer: wanted at most {most} bytes, found {needed}, {needed - most} too many; "
                    "choose a smaller block_d"
                )
            else:
                text = f"bishengir-compile gave no HIVM (exit {done.returncode}):\n{said[-3000:]}"
            raise RuntimeError(text) from None


def content(asm: Any, stage: str) -> bytes:
    """The bytes of a stage. Triton gives bytes; a fork may give a path, or its text and its path together."""
    found = asm.get(stage)
    parts = list(found) if isinstance(found, (list, tuple)) else [found]
    for part in reversed(parts):
        if isinstance(part, (bytes, bytearray)):
            return bytes(part)
        if isinstance(part, str) and "\n" not in part and os.path.isfile(part):
            with open(part, "rb") as file:
                return file.read()
    kinds = ", ".join(type(part).__name__ for part in parts) if found is not None else "no such stage"
    raise TypeError(f"wanted the bytes of stage {stage}, found {kinds}; Triton gave {', '.join(asm)}")


def told(error: BaseException) -> BaseException:
    """What went wrong in a stage, without the Ascend fork's frame around it, which names a folder of ours."""
    inner = error.__context__
    if type(error).__name__ != "MLIRCompilationError" or inner is None:
        return error
    if isinstance(inner, subprocess.CalledProcessError) and inner.stderr:
        said = inner.stderr.decode("utf-8", "replace").strip()[-3000:]
        return RuntimeError(os.path.basename(inner.cmd[0]) + " failed:\n" + said)
    return inner


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
            except Exception as wrapped:
                error = told(wrapped)
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
        print(json.dumps(probe(json.loads(input()))))
        return
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    folder = tempfile.mkdtemp(prefix="kvbuild-")
    try:
        # The stream that the first line came from: it may have read on already.
        serve(sys.stdin, answers, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
