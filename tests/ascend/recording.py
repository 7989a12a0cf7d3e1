"""The launcher over binaries that do nothing: what ACL is asked for, call by call."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from bench import ELF_MACHINE, HERE, Bench, Change, build, pipelines, stages_of

from kvbuild.kernels.ascend.pipeline import Stage

STANDIN = HERE.parent / "aot/standin"

# Before every scenario: the device's number in DLPack, and calls of each layout.
PRELUDE = """
from client import *
NPU = 12
kvb = Launcher()

def call(outputs=3, device=0, dense=False, **changes):
    at = (NPU, device)
    if dense:
        changes.setdefault("state_cache", tensor((5, 8, 1024), "float32", 0x100000, None, at))
    return operands(at, outputs, **changes)

def pin(variant):
    return kvb.answer(kvb.library.kvb_pin(0, ctypes.c_int64(variant)))
"""


@dataclass(frozen=True)
class Recording:
    """A bench, and how a scenario is run over it."""

    bench: Bench
    blobs: Mapping[str, bytes]

    def run(
        self, scenario: str, folder: Path, driver: Path | None = None, **settings: str
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Runs Python text that uses client.py; returns what it said and what ACL was asked for."""
        log = folder / "calls.jsonl"
        log.unlink(missing_ok=True)
        kept = {name: text for name, text in os.environ.items() if not name.startswith("KVB_")}
        environment = {
            **kept,
            "PYTHONPATH": str(STANDIN), "LD_LIBRARY_PATH": str(driver or self.bench.folder / "driver"),
            "KVB_STANDIN_LOG": str(log), "KVB_TEST_LAUNCHER": str(self.bench.folder / "launcher.so"),
            "KVB_TEST_MANIFEST": (self.bench.folder / "manifest.json").read_text(),
            "KVB_TEST_BLOBS": json.dumps({name: data.hex() for name, data in self.blobs.items()}),
            **settings,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(scenario)],
            env=environment, cwd=folder, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return json.loads(done.stdout), calls


def build_recording(folder: Path, cache: Path, change: Change = lambda target: None) -> Recording:
    """A launcher of every pipeline over made-up binaries."""
    chosen = pipelines()
    names = sorted(name for name, stage in stages_of(chosen).items() if stage.kind == "triton")
    blobs = {name: harness.image(ELF_MACHINE, tag) for tag, name in enumerate(names)}
    entries = {name: "entry_" + name.replace("-", "_") for name in names}
    return Recording(build(folder, cache, chosen, blobs, entries, change), blobs)


HIDDEN = "<QQQ"
FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}


def launches(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The stages among the calls that ACL got, in order, those that failed left out."""
    return [call for call in calls if call["call"] in ("launch", "aclnnIndexSelect") and "failed" not in call]


def names(calls: list[dict[str, Any]], *wanted: str) -> list[str]:
    """Which of the wanted functions were called with success, in order."""
    return [call["call"] for call in calls if call["call"] in wanted and "failed" not in call]


def unpacked(stage: Stage, block: bytes) -> tuple[tuple[int, ...], dict[str, Any], tuple[int, ...]]:
    """An argument block as hidden pointers, arguments by name, and the grid; read as the chip's compiler lays
    it out, each value at a multiple of its size."""
    at = struct.calcsize(HIDDEN)
    values = {}
    for argument in stage.arguments:
        form = "Q" if argument.type.startswith("*") else FORMATS[argument.type]
        size = struct.calcsize(form)
        at = -(-at // size) * size
        (values[argument.name],) = struct.unpack_from(f"<{form}", block, at)
        at += size
    at = -(-at // 4) * 4
    grid = struct.unpack_from("<iii", block, at)
    assert len(block) == -(-(at + 12) // 8) * 8
    return struct.unpack_from(HIDDEN, block), values, grid
