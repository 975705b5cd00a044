"""The arena as a device with streams uses it, and the thread that pins it."""

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import ArenaProgress
from blendhub.devices.runtime import Runtime

log = logging.getLogger(__name__)
LOOK_S = 0.1
"""The time between two looks for more reserved memory."""


def reserved_parts(
    arena: npt.NDArray[np.uint8], step: int, progress: Callable[[], ArenaProgress] | None, is_stopped: threading.Event
) -> Iterator[slice]:
    """Yields an arena's bytes in order, in parts of at most ``step`` bytes, each once the hub has reserved it.

    Ends when ``is_stopped`` is set, or when the hub will reserve no more. ``progress`` None: all of it is reserved.
    """
    progress = progress or (lambda: ArenaProgress(arena.size, arena.size))
    for part in _parts(arena.ctypes.data, step, 0, arena.size):
        while (known := progress()).reserved < part.stop:
            if not known.left or is_stopped.wait(LOOK_S):
                return
        if is_stopped.is_set():
            return
        yield part


def _parts(address: int, step: int, start: int, end: int) -> Iterator[slice]:
    """Ranges whose addresses end at multiples of the step, so that no page belongs to two of them."""
    while start < end:
        border = (address + start) // step * step + step - address
        yield slice(start, min(border, end))
        start = border


class HostArena:
    """An arena's bytes. ``pin`` page-locks them from the beginning on, as far as the machine allows.

    Copies may begin before that: those of bytes that are not pinned yet go through bounce buffers. ``progress`` says
    how far the arena is reserved by now; None: all of it.
    """

    def __init__(
        self, arena: npt.NDArray[np.uint8], runtime: Runtime, progress: Callable[[], ArenaProgress] | None = None
    ) -> None:
        self.bytes = arena
        self._address = arena.ctypes.data
        self._runtime = runtime
        self._progress = progress
        self._pinned: list[slice] = []
        self._pinned_end = 0
        self._is_stopped = threading.Event()
        with warnings.catch_warnings():
            # torch has no read-only tensors; saves to such an arena are refused.
            warnings.simplefilter("ignore", UserWarning)
            self.tensor = torch.from_numpy(arena)

    def is_pinned(self, end: int) -> bool:
        """Whether the bytes before ``end`` are pinned. They stay so until ``unpin``."""
        return end <= self._pinned_end

    def parts(self, start: int, end: int) -> Iterator[slice]:
        """Ranges that are pinned by one call each. CUDA refuses copies across two of them."""
        return _parts(self._address, self._runtime.registration_bytes, start, end)

    def pin(self) -> None:
        """Page-lock the arena: slow. Ends early, after the part at hand, when ``stop_pinning`` is called."""
        self._runtime.enter()
        for part in reserved_parts(self.bytes, self._runtime.registration_bytes, self._progress, self._is_stopped):
            started = time.monotonic()
            error = self._register(self.bytes[part])
            if error:
                log.warning(
                    "%d of the arena's %d MiB could not be pinned (%s), so KV takes the slower way through small "
                    "buffers there; %s",
                    (self.bytes.size - part.start) >> 20,
                    self.bytes.size >> 20,
                    error,
                    self._runtime.pinning_advice,
                )
                return
            self._pinned.append(part)
            self._pinned_end = part.stop
            # Calls of the accelerator may wait for the part. The pause lets them all through before the next one.
            self._is_stopped.wait(time.monotonic() - started)
        if not self._is_stopped.is_set():
            log.info("%d MiB of the arena's %d are pinned", self._pinned_end >> 20, self.bytes.size >> 20)

    def stop_pinning(self) -> None:
        self._is_stopped.set()

    def unpin(self) -> None:
        """Undo all page-locking. No copy may be under way."""
        self._runtime.enter()
        self._pinned_end = 0
        while self._pinned:
            self._runtime.unregister(self.bytes[self._pinned.pop()])

    def _register(self, memory: npt.NDArray[np.uint8]) -> str | None:
        try:
            return self._runtime.register(memory)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


class PinningThread:
    """Runs functions in order, so that no step of an engine waits: the machine locks a GiB in 0.1 to 0.5 s.

    A process may end while it runs one.
    """

    def __init__(self, device: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"blendhub-{device}-pinning", daemon=True)
        self._thread.start()

    def run_later(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def wait(self) -> None:
        """Return when everything that was added has run."""
        done = threading.Event()
        self._work.put(done.set)
        done.wait()

    def close(self) -> None:
        """Run what was added, and end the thread."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("the arena's memory could not be pinned or released")
            del work  # it refers to the arena, which must be freed before the next work comes
