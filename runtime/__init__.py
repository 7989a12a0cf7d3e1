"""Loads compiled operators from a bundle: what a serving process imports. No compiler, no Triton.

from kvbuild import runtime
op = runtime.load("compress.kvb", device="cuda:0")
op.compress(...)
"""

import os
import sys

# Without this, importing tvm_ffi beside an older torch would start a C++ compiler.
os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")

from .errors import BundleError, DeviceError, KvbuildError, NoMatchingArtifact
from .operator import Operator, load

# tvm_ffi imports torch where it is installed. With torch there already it is quick, and best done now; else
# `load` does it, so that reading a bundle never waits for torch.
if "torch" in sys.modules:
    import tvm_ffi  # noqa: F401

__all__ = ["BundleError", "DeviceError", "KvbuildError", "NoMatchingArtifact", "Operator", "load"]
