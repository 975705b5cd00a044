"""Registers the arena with ACL, so that the NPU's copy engine reads and writes it without a detour."""

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

MAPPED = 0x2
PINNED = 0x10000000
"""Flags of ``npuHostRegister``."""
MAP_HOST_MEMORY = 0
"""The only type of ``aclrtHostRegister``."""


class HostMemory:
    """Page-locks host memory: through torch_npu where it can (from 2.10.0.post5 on), else through CANN's library."""

    def __init__(self, npu: Any, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._npu = npu
        self._load = load

    def register(self, address: int, nbytes: int) -> str | None:
        """Returns the reason of a failure."""
        first, whole = _whole_pages(address, nbytes)
        if hasattr(self._npu, "npurt"):
            return self._call(
                "npuHostRegister", lambda: self._npu.npurt().npuHostRegister(first, whole, MAPPED | PINNED)
            )
        device_address = ctypes.c_void_p()
        return self._call(
            "aclrtHostRegister",
            lambda: self._acl().aclrtHostRegister(
                ctypes.c_void_p(first), ctypes.c_uint64(whole), MAP_HOST_MEMORY, ctypes.byref(device_address)
            ),
        )

    def unregister(self, address: int) -> str | None:
        first, _ = _whole_pages(address, 0)
        if hasattr(self._npu, "npurt"):
            return self._call("npuHostUnregister", lambda: self._npu.npurt().npuHostUnregister(first))
        return self._call("aclrtHostUnregister", lambda: self._acl().aclrtHostUnregister(ctypes.c_void_p(first)))

    def _acl(self) -> Any:
        return self._load("libascendcl.so")

    def _call(self, name: str, call: Callable[[], Any]) -> str | None:
        try:
            status = call()
        except (OSError, AttributeError, RuntimeError) as error:
            return f"{name} failed: {error}"
        return f"{name} returned error {int(status)}" if status else None


def _whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """ACL takes whole pages of memory only. Those around the arena are mapped as it is."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    return first, -(-(address + nbytes - first) // mmap.PAGESIZE) * mmap.PAGESIZE
