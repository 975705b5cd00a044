"""The part of an accelerator's runtime that devices with streams use. Tests replace it by a deferred one."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch


class Runtime(ABC):
    """Streams, events, copies, kernel launches and memory. Only ``synchronize`` blocks the calling thread.

    Streams and events are the accelerator's own objects. A device that does all its work through this interface can be
    tested without the accelerator, by :class:`blendhub.testing.devices.streams.StreamSuite`.

    A thread calls ``enter`` before any other method. Without it, CUDA would use the machine's first GPU, where each
    process that does so occupies half a GiB, and an NPU would refuse the call.
    """

    pinning_advice: ClassVar[str] = "raise the limit of locked memory, in a container as well: ulimit -l unlimited"
    """The advice for machines where the arena cannot be page-locked."""

    registration_bytes: ClassVar[int] = 2**28
    """The most memory of one call of ``register``, a multiple of all page sizes. Other threads' calls of an accelerator
    may wait for it, so it takes tens of milliseconds, not seconds."""

    kernels_reach_registered_memory: bool = False
    """Whether kernels may read and write registered memory at its host address, so that it needs no staging."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def enter(self) -> None:
        """Make the accelerator the calling thread's current device, unless an earlier call did."""
        if not getattr(self._thread, "has_entered", False):
            self.set_device()
            self._thread.has_entered = True

    @abstractmethod
    def set_device(self) -> None:
        """Make the accelerator the calling thread's current device. ``enter`` calls it once in each thread."""

    @abstractmethod
    def create_stream(self) -> Any:
        """A new stream beside the engine's. Work that is submitted to one stream runs in order."""

    @abstractmethod
    def record_event(self, stream: Any = None) -> Any:
        """An event at the end of the stream's work so far; without a stream, of the engine's current stream."""

    @abstractmethod
    def wait_event(self, stream: Any, event: Any) -> None:
        """Work that is submitted to the stream from now on begins after the event."""

    @abstractmethod
    def query(self, event: Any) -> bool:
        """Whether the event has been reached. Never blocks."""

    @abstractmethod
    def synchronize(self, event: Any) -> None:
        """Block until the event is reached. The host, and work submitted later, then see all work before it."""

    @abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory."""

    @abstractmethod
    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory. Once freed, it is reused only after the copies that were submitted with it."""

    @abstractmethod
    def register(self, memory: npt.NDArray[np.uint8]) -> str | None:
        """Page-lock a part of the arena, so that ``copy`` takes it. Returns the reason of a failure."""

    @abstractmethod
    def unregister(self, memory: npt.NDArray[np.uint8]) -> None:
        """Undo ``register``. No copy of this memory may be pending."""

    @abstractmethod
    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes between page-locked and device memory."""

    def copy_many(self, stream: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each pair's second tensor to its first, as ``copy`` does."""
        for target, source in pairs:
            self.copy(stream, target, source)

    @abstractmethod
    def launch(self, stream: Any, kernel: Callable[..., object], arguments: Mapping[str, Any]) -> None:
        """Call ``kernel(**arguments)`` so that its work runs in the stream."""
