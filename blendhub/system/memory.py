"""The kernel's calls about mapped memory that Python lacks, or makes with the interpreter's lock held."""

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_REMOVE = 22, 23, 9
_MPOL_INTERLEAVE = 3
_MBIND = {"x86_64": 237, "aarch64": 235, "ppc64le": 259}
"""The number of the system call, by machine; only libnuma, which is rarely installed, has a function for it."""

_LIBC = ctypes.CDLL(None, use_errno=True)


def madvise(address: int, size: int, advice: int) -> None:
    """Advise the kernel about memory; other threads run meanwhile."""
    _check(_LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice), "madvise")


def interleave(address: int, size: int, nodes: Sequence[int]) -> None:
    """Have the pages of memory, which are still to be made, lie on these NUMA nodes in turn."""
    if platform.machine() not in _MBIND:
        raise OSError(f"the number of mbind is not known for {platform.machine()}")
    words = (ctypes.c_uint64 * (max(nodes) // 64 + 1))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    n_bits = ctypes.c_ulong(64 * len(words) + 1)  # the kernel takes one bit less
    number, start, n_bytes = ctypes.c_long(_MBIND[platform.machine()]), ctypes.c_void_p(address), ctypes.c_size_t(size)
    _check(_LIBC.syscall(number, start, n_bytes, _MPOL_INTERLEAVE, words, n_bits, 0), "mbind")


def memory_nodes(root: Path = Path("/")) -> list[int]:
    """The NUMA nodes with memory that this process may use. ``root`` is where ``/proc`` and ``/sys`` are looked for."""
    try:
        present = (root / "sys/devices/system/node/has_memory").read_text(encoding="ascii")
        status = (root / "proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    allowed = next((line.partition(":")[2] for line in status if line.startswith("Mems_allowed_list:")), "")
    return sorted(_numbers(present) & _numbers(allowed))


def _numbers(text: str) -> set[int]:
    """The numbers of a list such as ``0-3,8``."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def _check(status: int, call: str) -> None:
    if status:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")
