"""The current stream, for devices whose framework does not hand it on with its tensors.

torch's DLPack exchange carries the stream of CUDA and ROCm. For an NPU or a MUSA device the launcher is told
of it before each call; asking torch_npu for it also empties torch_npu's queue of work that is not on the
stream yet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from .launcher import Launcher
from .vendors import VENDORS

# What tells the calling thread's stream on a device that is not CUDA's or ROCm's to DLPack.
_TOLD_BY = tuple(row.driver.stream for row in VENDORS.values() if row.driver.stream is not None)


def teller(launcher: Launcher, index: int) -> Callable[[], None] | None:
    """What a call has to do first, in the thread that calls; None where nothing."""
    use_stream = launcher.use_stream
    if use_stream is None:
        return None

    def tell() -> None:
        for package, part, function in _TOLD_BY:
            found = sys.modules.get(package)
            if found is not None:
                use_stream(index, getattr(getattr(found, part), function)(index))
                return

    return tell
