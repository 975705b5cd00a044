"""The process's page tables for the arena, filled ahead of the first copies."""

import logging
import mmap
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from blendhub.contracts import ArenaProgress
from blendhub.devices import reserved_parts
from blendhub.system.memory import MADV_POPULATE_READ, MADV_POPULATE_WRITE, madvise
from blendhub.system.processes import let_others_run_first

log = logging.getLogger(__name__)
STEP = 2**21
"""The most bytes of one call. While it runs, other threads cannot map or unmap memory."""
NICENESS = 10
"""Where cores are scarce, an engine's steps come first."""


class ArenaPages:
    """A thread that has the kernel fill the process's page tables for the arena, as far as the hub has reserved it.

    Otherwise the engine's thread does so page by page in the first copy of each, which takes four times as long then.
    """

    def __init__(self, arena: npt.NDArray[np.uint8], progress: Callable[[], ArenaProgress] | None) -> None:
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(arena, progress), name="blendhub-cpu-pages", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Return when the thread has dropped the arena."""
        self._is_stopped.set()
        self._thread.join()

    def _fill(self, arena: npt.NDArray[np.uint8], progress: Callable[[], ArenaProgress] | None) -> None:
        let_others_run_first(NICENESS)
        advice = MADV_POPULATE_WRITE if arena.flags.writeable else MADV_POPULATE_READ
        address = arena.ctypes.data
        for part in reserved_parts(arena, STEP, progress, self._is_stopped):
            start, end = (-(-(address + at) // mmap.PAGESIZE) * mmap.PAGESIZE for at in (part.start, part.stop))
            try:
                madvise(start, end - start, advice)
            except OSError as error:  # such as before Linux 5.14, which has no such advice
                log.debug("copies fill the page tables for the arena: %s", error)
                break
