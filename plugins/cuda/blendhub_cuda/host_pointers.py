"""Whether kernels may use a host address of registered memory, which torch does not tell."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

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
