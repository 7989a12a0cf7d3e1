"""What the benchmark launches through Triton's JIT computes what the operator does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_calls_are_right_under_the_interpreter() -> None:
    script = Path(__file__).with_name("interpreted.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        f"{name}, ratio {ratio}: 2 outputs, 0 wrong"
        for ratio in (128, 256)
        for name in ("whole window", "one launch", "two launches")
    ]
