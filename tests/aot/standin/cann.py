"""A stand-in CANN: a hivmc that checks how it is called and writes marked objects, and a bundle for it."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from kvbuild.aot import bundle as bundles
from kvbuild.aot import spec
from kvbuild.aot.spec import TargetName
from kvbuild.aot.staging import pipelines, staged_table
from kvbuild.runtime.manifest import Manifest, Numerics, Target

STANDIN = """
import hashlib, os, re, sys, time

def elf(machine, *parts):
    start = b"\\x7fELF\\x02\\x01\\x01".ljust(18, b"\\0")
    return start + machine.to_bytes(2, "little") + bytes(44) + b"".join(parts)

mode = os.environ.get("STANDIN", "")
if sys.argv[1:] == ["--version"]:
    if mode in ("speechless", "blank"):
        sys.exit(print("\\n \\t\\n" * (mode == "blank"), end=""))
    if mode == "odd":
        sys.exit(print("\\n \\x1b[1mCANN 8.5 compiler\\u00e9 build" + " x" * 200 + "\\nmore"))
    print("hivmc 1.4.2 (0a1b2c3 2026-03-01)")
    sys.exit(9 if mode == "broken" else 0)
source, *flags, dash_o, out = sys.argv[1:]
assert source == "module.hivm.opt.mlir" and dash_o == "-o", sys.argv
assert flags == [
    "--enable-debug-info=false", "--enable-static-bare-ptr=true", "--enable-bin-relocation=true",
    "--enable-hivm-inject-barrier-all-sync=false", "--enable-sanitizer=false",
], flags
assert os.listdir(".") == [source]
text = open(source, "rb").read()
entry = re.search(rb"func.func @([a-z_0-9]+)", text)[1]
if mode == "fails" and entry == b"normalise":
    print("error: no registers left", file=sys.stderr)
    sys.exit(3)
if mode == "silent":
    sys.exit(0)
if mode == "escapes":
    os.write(2, b"\\x1b[2J\\xff wiped")
    sys.exit(1)
if mode == "floods":
    while True:
        os.write(1, b"words without end\\n" * 1000)
if mode == "hangs":
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    open(os.environ["PID"], "w").write(str(child))
    time.sleep(1000)
odd = {"pipe": os.mkfifo, "folder": os.mkdir, "endless": lambda at: os.symlink("/dev/zero", at)}
if mode in odd:
    odd[mode](out)
    sys.exit(0)
machine = {"host": 62, "mixed": len(entry) + 5000}.get(mode, 0x1029)
named = b"" if mode == "nameless" else entry
data = b"cut off" if mode == "text" else elf(machine, b"marked:", hashlib.sha256(text).digest(), named)
open(out, "wb").write(data)
"""


def hivm(name: str, entry: str) -> bytes:
    """What stands for a stage's HIVM: an entry, and something of its own."""
    return f"module attributes {{}} {{\n  func.func @{entry}() // {name}\n}}\n".encode()


def staged_target(arch: str) -> tuple[Target, dict[str, bytes]]:
    """A target whose kernels are HIVM, as the packaged build.yaml plans it, and its blobs."""
    planned = pipelines(spec.load(spec.PACKAGED), TargetName("ascend", arch))
    stages = {stage.name: stage for each in planned for stage in each.stages if stage.kind == "triton"}
    texts = {name: hivm(name, stage.function) for name, stage in stages.items()}
    digests = {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}
    table = staged_table(planned, {name: (digests[name], stages[name].function, 4096) for name in stages})
    launcher = f"a launcher for {arch}".encode()
    target = Target(
        vendor="ascend", arch=arch, route="staged", warp_size=0, elf_machine=0, min_driver=0,
        toolchain={"triton": "3.2.0", "evidence": "none"}, numerics=Numerics(False, "unknown"),
        source_digest="0" * 64,
        launchers={"aarch64-linux-gnu.2.17": hashlib.sha256(launcher).hexdigest()},
        launch_table=table.digest, kernels=(), variants=(), staged=table,
    )  # fmt: skip
    blobs = {digests[name]: text for name, text in texts.items()}
    return target, blobs | {hashlib.sha256(launcher).hexdigest(): launcher}


def write_unfinished(path: Path) -> Path:
    """A bundle of two Ascend targets."""
    targets, blobs = zip(staged_target("910B1"), staged_target("910B2"), strict=True)
    content = {**blobs[0], **blobs[1]}
    bundles.write(
        path, Manifest("0.1.0", targets, {name: len(data) for name, data in content.items()}), content
    )
    return path


def install(folder: Path) -> Path:
    """A CANN's folder with the stand-in where hivmc lies."""
    path = folder / "tools/bishengir/bin/hivmc"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!{sys.executable} -S\n{STANDIN}")
    path.chmod(0o755)
    return folder


def environment(cann: Path, **changes: str) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "ASCEND_HOME_PATH": str(cann), **changes}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
