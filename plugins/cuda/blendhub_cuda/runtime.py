"""CUDA as the runtime of the device, through torch."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from blendhub.core.errors import Unsupported
from blendhub.devices import Runtime
from blendhub_cuda.host_pointers import kernels_use_host_addresses

Arena: TypeAlias = npt.NDArray[np.uint8]


class CudaRuntime(Runtime):
    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise Unsupported(
                f"the pages lie on {device}, but device 'cuda' supports only pages in GPU memory; choose another device"
            )
        super().__init__()
        self._device = device
        self.kernels_reach_registered_memory = kernels_use_host_addresses(device)

    def set_device(self) -> None:
        torch.cuda.set_device(self._device)

    def create_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def record_event(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        # Blocking: the waiting thread sleeps instead of spinning on a core.
        event = torch.cuda.Event(blocking=True)
        event.record(stream or torch.cuda.current_stream(self._device))
        return event

    def wait_event(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def query(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def register(self, memory: Arena) -> str | None:
        error = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.size, 0)
        if int(error) == 0:
            return None
        # CUDA reports the failure again at the next launch; this launch absorbs it.
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        return str(torch.cuda.cudart().cudaGetErrorString(error))

    def unregister(self, memory: Arena) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)

    def copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def launch(self, stream: torch.cuda.Stream, kernel: Callable[..., object], arguments: Mapping[str, Any]) -> None:
        with torch.cuda.stream(stream):
            kernel(**arguments)
