"""Settings of Python's garbage collector and the C library's allocator, for a process that runs nothing but a hub."""

import contextlib
import ctypes
import gc

M_MMAP_THRESHOLD = -3
LARGE_BYTES = 2**20


def tune_process() -> None:
    """Make all of these settings."""
    disable_full_collections()
    return_large_blocks()


def disable_full_collections() -> None:
    """Collect only the young generations from now on: with a million chunks, a full collection stops the hub for
    more than a second.

    The hub's state has no reference cycles, so what it drops is freed at once. Cycles come from errors and tasks
    alone; they are young when they become garbage, so the collections of the young generations find them.
    """
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 2**31 - 1)


def return_large_blocks() -> None:
    """Have the memory of large messages go back to the system as soon as they are freed.

    glibc would raise the size from which it does so to that of the largest block freed so far. Messages of megabytes
    would lie among small blocks that live longer, and leave gaps that nothing fills.
    """
    with contextlib.suppress(OSError, AttributeError):  # a C library without such a setting
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
