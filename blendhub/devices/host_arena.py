"""The arena as a device with streams uses it."""

import logging
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from blendhub.devices.runtime import Runtime

log = logging.getLogger(__name__)


class HostArena:
    """An arena's bytes. ``pin`` page-locks them from the beginning on, as far as the machine allows.

    Copies may begin before that: those of bytes that are not pinned yet go through bounce buffers.
    """

    def __init__(self, arena: npt.NDArray[np.uint8], runtime: Runtime) -> None:
        self.bytes = arena
        self._runtime = runtime
        self._pinned: list[slice] = []
        self._pinned_end = 0
        self._is_stopped = threading.Event()
        with warnings.catch_warnings():
            # torch has no read-only tensors; saves to such an arena are refused.
            warnings.simplefilter("ignore", UserWarning)
            self.tensor = torch.from_numpy(arena)

    def is_pinned(self, start: int, end: int) -> bool:
        """Whether these bytes are pinned. They stay so until ``unpin``."""
        return end <= self._pinned_end

    def parts(self, start: int, end: int) -> Iterator[slice]:
        """Ranges that are pinned by one call each. CUDA refuses copies across two of them."""
        step, address = self._runtime.registration_bytes, self.bytes.ctypes.data
        while start < end:
            # Addresses are multiples of the step, so that no page belongs to two parts.
            border = (address + start) // step * step + step - address
            yield slice(start, min(border, end))
            start = border

    def pin(self) -> None:
        """Page-lock the arena: slow. Ends early, after the part at hand, when ``stop_pinning`` is called."""
        self._runtime.enter()
        for part in self.parts(0, self.bytes.size):
            if self._is_stopped.is_set():
                return
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
        log.info("all %d MiB of the arena are pinned", self.bytes.size >> 20)

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
