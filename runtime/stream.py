"""The current stream, for devices whose framework does not hand it on with its tensors.

torch's DLPack exchange carries the stream of CUDA and ROCm. For an NPU the launcher is told of it before each
call, and asking torch_npu for it also empties torch_npu's queue of work that is not on the stream yet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from .launcher import Launcher


def teller(launcher: Launcher, index: int) -> Callable[[], None] | None:
    """What a call has to do first, in the thread that calls; None where nothing."""
    use_stream = launcher.use_stream
    if use_stream is None:
        return None

    def tell() -> None:
        torch_npu = sys.modules.get("torch_npu")
        if torch_npu is not None:
            use_stream(index, torch_npu._C._npu_getCurrentRawStream(index))

    return tell
