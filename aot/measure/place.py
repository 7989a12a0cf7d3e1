"""The device under test, with a stream's worth of difference between the host and a GPU hidden."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Place:
    """One device. On the cpu there are no streams: `stream` gives None, which `on` accepts."""

    device: torch.device

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        if self.is_gpu:
            return torch.cuda.get_device_name(self.device)
        return f"this host's processor, {torch.get_num_threads()} threads of torch"

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def stream(self) -> Any:
        return torch.cuda.Stream(self.device) if self.is_gpu else None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream) if stream is not None else nullcontext()
