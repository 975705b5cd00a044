"""CUDA as the runtime of the device, through torch."""

import ctypes
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from blendhub.core.errors import Unsupported
from blendhub.devices import Runtime

Arena: TypeAlias = npt.NDArray[np.uint8]

CUDA = "libcuda.so.1", "cuDeviceGetAttribute", 91
HIP = "libamdhip64.so", "hipDeviceGetAttribute", 4
"""Library, function, and the number there of the attribute ``CanUseHostPointerForRegisteredMem``."""


def kernels_use_host_addresses(device: torch.device, load: Callable[[str], Any] = ctypes.CDLL) -> bool:
    """False also where the driver does not answer. Under WSL2 the addresses differ."""
    library, function, attribute = HIP if torch.version.hip else CUDA
    answer = ctypes.c_int(0)
    try:
        status = getattr(load(library), function)(ctypes.byref(answer), attribute, device.index)
    except (OSError, AttributeError):
        return False
    return status == 0 and answer.value == 1


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
