"""CUDA as the runtime of the device, through torch."""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from blendhub.core.errors import Unsupported
from blendhub.devices import Runtime

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
    event_options = {"blocking": True}  # noqa: RUF012 (read only)
    """The waiting thread sleeps instead of spinning on a core."""

    def __init__(self, place: torch.device) -> None:
        if place.type != "cuda":
            raise Unsupported(
                f"the pages lie on {place}, but device 'cuda' supports only pages in GPU memory; choose another device"
            )
        super().__init__(place, torch.cuda)
        self.kernels_reach_registered_memory = kernels_use_host_addresses(place)

    def copy(self, stream: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """By one call of torch: after each, this thread may have to wait for its turn of the interpreter."""
        targets, sources = zip(*pairs, strict=True)
        self.launch(stream, torch._foreach_copy_, targets, sources, True)

    def register(self, memory: npt.NDArray[np.uint8]) -> str | None:
        error = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.size, 0)
        if int(error) == 0:
            return None
        # CUDA reports the failure again at the next launch; this launch absorbs it.
        with suppress(RuntimeError):
            torch.zeros(1, device=self._place)
        return str(torch.cuda.cudart().cudaGetErrorString(error))

    def unregister(self, memory: npt.NDArray[np.uint8]) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)
