"""C launchers: generated from a target's launch table, compiled for a host platform."""

from .generate import launch_table_digest
from .zig import build_launcher, launcher_key

__all__ = ["build_launcher", "launch_table_digest", "launcher_key"]
