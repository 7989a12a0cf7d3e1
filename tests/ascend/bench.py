"""A launcher whose kernels are the pipeline's stages, lowered to this host, and what runs them."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
import hostir
from hosttools import HostTools, own_environment

from kvbuild.aot.cache import default_folder
from kvbuild.aot.launcher import build_launcher, launch_table_digest
from kvbuild.aot.publish import publish
from kvbuild.kernels.ascend import pipeline
from kvbuild.kernels.ascend.pipeline import Stage
from kvbuild.kernels.contract import COMPRESS_RATIOS

Change = Callable[[dict[str, Any]], None]

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"
ARCH = "910B2"
# No build machine knows what hivmc writes; any number that is nobody's will do.
ELF_MACHINE = 0x1029
CHUNK_BYTES = 256 << 20

# One output a chunk, or a few, so that a call takes several and the last one is smaller.
SMALL_CHUNKS: Mapping[str, int] = {"index_select": 4 << 20, "block": 20_000}


@dataclass(frozen=True)
class Pipeline:
    """One variant: what kernels/ascend/pipeline.py is asked for."""

    route: str
    ratio: int
    layout: str
    block_d: int
    chunk_bytes: int

    @property
    def stages(self) -> tuple[Stage, ...]:
        return pipeline.stages(self.route, self.ratio, self.layout, self.block_d)


def pipelines(ratios: Sequence[int] = COMPRESS_RATIOS) -> list[Pipeline]:
    """Every route of every ratio; each also in small chunks, and for the smallest ratio with every tile."""
    found = []
    routes = (("index_select", "dense"), ("block", "aligned"), ("block", "general"))
    for ratio in ratios:
        # What a call that is not pinned takes comes first. The last one of a ratio takes any call.
        found += [Pipeline(route, ratio, layout, 512, CHUNK_BYTES) for route, layout in routes]
        for route, layout in routes:
            if ratio == min(COMPRESS_RATIOS):
                found += [Pipeline(route, ratio, layout, d, CHUNK_BYTES) for d in pipeline.BLOCK_DIMS[1:]]
            small = max(SMALL_CHUNKS[route], pipeline.bytes_per_output(route, ratio) + (1 << 13))
            found.append(Pipeline(route, ratio, layout, 512, small))
    return found


def stages_of(chosen: Iterable[Pipeline]) -> dict[str, Stage]:
    """The stages of these pipelines, each once, by name."""
    return {stage.name: stage for each in chosen for stage in each.stages}


def linalg(command: Sequence[str], stages: Mapping[str, Stage], folder: Path) -> dict[str, str]:
    """The linalg IR of each stage, compiled by the toolchain's own interpreter."""
    requests = [
        {
            "name": stage.name, "module": stage.source[: -len(".py")], "function": stage.function,
            "signature": {argument.name: argument.type for argument in stage.arguments},
            "constexprs": dict(stage.constexprs), "arch": f"Ascend{ARCH}",
        }
        for stage in stages.values()
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [*command, str(HERE / "frontend.py"), str(KERNELS), str(folder)],
        input="\n".join(json.dumps(request) for request in requests),
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_DISABLE_LINE_INFO": "1"},
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    return {name: (folder / f"{name}.mlir").read_text() for name in stages}


def as_device_binary(shared_object: bytes) -> bytes:
    """The host's code under the chip's ELF machine number, as the launcher wants it."""
    return shared_object[:18] + ELF_MACHINE.to_bytes(2, "little") + shared_object[20:]


@dataclass(frozen=True)
class Bench:
    """A built launcher with its manifest and blobs in files, and the folder of the stand-in ACL."""

    folder: Path
    variants: tuple[Pipeline, ...]

    def variant(self, route: str, ratio: int, layout: str, block_d: int = 512, small: bool = False) -> int:
        """The place of a variant in the launch table, to pin it."""
        for index, each in enumerate(self.variants):
            same = (each.route, each.ratio, each.layout) == (route, ratio, layout)
            if same and each.block_d == block_d and (each.chunk_bytes != CHUNK_BYTES) == small:
                return index
        raise KeyError((route, ratio, layout, block_d, small))


def _arguments(stage: Stage) -> list[dict[str, Any]]:
    return [asdict(argument) for argument in stage.arguments]


def target_of(
    chosen: Sequence[Pipeline], blobs: Mapping[str, str], entries: Mapping[str, str]
) -> dict[str, Any]:
    """A target of the manifest. blobs, entries: sha256 and symbol of each stage's binary."""
    stages = stages_of(chosen)
    kernels = [
        {
            "name": name, "entry": entries[name], "blob": blobs[name], "args": _arguments(stages[name]),
            "constexprs": dict(stages[name].constexprs), "per_output": stages[name].per_output, "ub_bytes": 0,
        }
        for name in sorted(blobs)
    ]  # fmt: skip
    operators = [
        {
            "name": stage.name, "function": stage.function, "args": _arguments(stage),
            "constants": dict(stage.constexprs),
        }
        for stage in stages.values()
        if stage.kind == "aclnn"
    ]  # fmt: skip
    variants = [
        {
            "ratio": each.ratio, "layout": each.layout, "max_outputs": None, "route": each.route,
            "block_d": each.block_d, "chunk_bytes": each.chunk_bytes,
            "chunk_outputs": pipeline.chunk_outputs(each.route, each.ratio, each.chunk_bytes),
            "stages": [stage.name for stage in each.stages],
            "intermediates": [
                {"name": part.name, "dtype": part.dtype, "shape": list(part.shape)}
                for part in pipeline.intermediates(each.route, each.ratio)
            ],
        }
        for each in chosen
    ]  # fmt: skip
    return {
        "vendor": "ascend", "arch": ARCH, "route": "staged", "elf_machine": 0, "min_driver": 0,
        "stage": "device", "kernels": kernels, "operators": operators, "variants": variants,
        "launch_table": launch_table_digest(kernels, variants),
    }  # fmt: skip


def build(folder: Path, cache: Path, chosen: Sequence[Pipeline], binaries: Mapping[str, bytes],
          entries: Mapping[str, str], change: Change = lambda target: None) -> Bench:  # fmt: skip
    """A bench in `folder`. binaries: each stage's device binary, by name; change: alters the target first."""
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in binaries.items()}
    target = target_of(chosen, digests, entries)
    change(target)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "launcher.so").write_bytes(build_launcher(target, harness.host_triple()))
    (folder / "manifest.json").write_bytes(harness.manifest_of(target))
    (folder / "blobs").mkdir(exist_ok=True)
    for name, data in binaries.items():
        (folder / "blobs" / name).write_bytes(data)
    driver = folder / "driver"
    harness.build_shared("acl.c", driver, "libascendcl.so", cache, "-Wno-unused-function")
    library = driver / "libopapi.so"
    if not library.exists():
        library.symlink_to("libascendcl.so")
    return Bench(folder, tuple(chosen))


def _lowered(tools: HostTools, text: str) -> bytes:
    """The host's object of a kernel, kept from run to run by all that it is made from."""
    folder = default_folder(own_environment()) / "ascend-host-objects"
    made_from = (text, (HERE / "hostir.py").read_text(), str(tools.root))
    path = folder / hashlib.sha256("\0".join(made_from).encode()).hexdigest()
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        publish(path, "object", [hostir.lower(tools, text)])
    return path.read_bytes()


def build_running(tools: HostTools, command: Sequence[str], folder: Path, cache: Path) -> Bench:
    """A bench whose kernels run: every stage compiled, lowered to this host and linked."""
    chosen = pipelines()
    stages = {name: stage for name, stage in stages_of(chosen).items() if stage.kind == "triton"}
    texts = linalg(command, stages, folder / "linalg")
    with ThreadPoolExecutor(2) as pool:
        lowered = pool.map(functools.partial(_lowered, tools), texts.values())
        objects = dict(zip(texts, lowered, strict=True))
    entries = {name: hostir.entry_of(text) for name, text in texts.items()}
    binaries = {name: as_device_binary(data) for name, data in objects.items()}
    return build(folder, cache, chosen, binaries, entries)


class Executor:
    """A process that has opened the launcher and runs calls through it; see executor.py."""

    def __init__(self, bench: Bench, log: Path | None = None, **settings: str) -> None:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("KVB_STANDIN")},
            "LD_LIBRARY_PATH": str(bench.folder / "driver"), "KVB_STANDIN_SILENT": "1",
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent / "aot/standin"), **settings,
        }  # fmt: skip
        if log is not None:
            environment["KVB_STANDIN_LOG"] = str(log)
        self.bench = bench
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "executor.py"), str(bench.folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def ask(self, **request: Any) -> Any:
        """The answer to one request."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the executor ended with status {self.process.wait(timeout=30)}"
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()
