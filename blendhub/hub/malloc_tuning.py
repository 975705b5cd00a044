"""Settings of the C library's allocator for a process that runs nothing but a hub."""

import contextlib
import ctypes

M_MMAP_THRESHOLD = -3
LARGE_BYTES = 2**20


def return_large_blocks() -> None:
    """Have the memory of large messages go back to the system as soon as they are freed.

    glibc would raise the size from which it does so to that of the largest block freed so far. Messages of megabytes
    would lie among small blocks that live longer, and leave gaps that nothing fills.
    """
    with contextlib.suppress(OSError, AttributeError):  # a C library without such a setting
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
