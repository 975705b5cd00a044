"""Settings of Python's garbage collector and the C library's allocator, for a process that runs nothing but a hub."""

import contextlib
import ctypes
import gc

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
LARGE_BYTES = 2**20


def tune_process() -> None:
    """Have full collections look only at what has become old since the last one: with a million chunks, one that looks
    at all of them stops the hub for more than a second. The hub's state has no reference cycles, so what it drops is
    freed at once, frozen or not. Cycles come from errors and tasks alone, which do not live for long.

    Have the memory of large messages go back to the system as soon as they are freed. glibc would raise the size from
    which it does so to that of the largest block freed so far: messages of megabytes would lie among small blocks that
    live longer, and leave gaps that nothing fills.

    Let all threads allocate from one heap, in place of one for each, whose gaps no other thread fills. They hardly wait
    for each other: most allocate only while they hold Python's lock.
    """
    gc.freeze()
    gc.callbacks.append(_freeze_survivors)
    with contextlib.suppress(OSError, AttributeError):  # a C library without such settings
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(M_ARENA_MAX, 1)


def _freeze_survivors(phase: str, facts: dict[str, int]) -> None:
    if phase == "stop" and facts["generation"] == 2:
        gc.freeze()
