"""The part of an accelerator's runtime that devices with streams use. Tests replace it by a deferred one."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch


class Runtime(ABC):
    """Streams, events, copies, kernel launches and memory, through torch's module of an accelerator, as ``torch.cuda``.

    Only ``synchronize`` blocks the calling thread. A device that does all its work through this interface can be
    tested without the accelerator, by :class:`blendhub.testing.devices.streams.StreamSuite`.

    A thread calls ``enter`` before any other method. Without it, CUDA would use the machine's first GPU, where each
    process that does so occupies half a GiB, and an NPU would refuse the call.
    """

    pinning_advice: ClassVar[str] = "raise the limit of locked memory, in a container as well: ulimit -l unlimited"
    """The advice for machines where the arena cannot be page-locked."""

    registration_bytes: ClassVar[int] = 2**23
    """The most memory of one call of ``register``, a multiple of all page sizes. Other threads' calls of an accelerator
    may wait for it, so it takes 1 to 4 milliseconds, where a GiB takes 0.1 to 0.5 s."""

    event_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Arguments of the accelerator's events."""

    kernels_reach_registered_memory: bool = False
    """Whether kernels may read and write registered memory at its host address, so that it needs no staging."""

    def __init__(self, place: torch.device, accelerator: Any) -> None:
        self._place = place
        self._accelerator = accelerator
        self._thread = threading.local()

    def enter(self) -> None:
        """Make the accelerator the calling thread's current device, unless an earlier call did."""
        if not getattr(self._thread, "has_entered", False):
            self.set_device()
            self._thread.has_entered = True

    def set_device(self) -> None:
        """Make the accelerator the calling thread's current device. ``enter`` calls it once in each thread."""
        self._accelerator.set_device(self._place)

    def create_stream(self) -> Any:
        """A new stream beside the engine's. Work that is submitted to one stream runs in order."""
        return self._accelerator.Stream(self._place)

    def record_event(self, stream: Any = None) -> Any:
        """An event at the end of the stream's work so far; without a stream, of the engine's current stream."""
        event = self._accelerator.Event(**self.event_options)
        event.record(stream or self._accelerator.current_stream(self._place))
        return event

    def wait_event(self, stream: Any | None, event: Any) -> None:
        """Work that is submitted to the stream, None: the engine's current one, from now on begins after the event."""
        (stream or self._accelerator.current_stream(self._place)).wait_event(event)

    def query(self, event: Any) -> bool:
        """Whether the event has been reached. Never blocks."""
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        """Block until the event is reached. The host, and work submitted later, then see all work before it."""
        event.synchronize()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._place)

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory. Once freed, it is reused only after the copies that were submitted with it."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    @abstractmethod
    def register(self, memory: npt.NDArray[np.uint8]) -> str | None:
        """Page-lock a part of the arena, so that ``copy`` takes it. Returns the reason of a failure."""

    @abstractmethod
    def unregister(self, memory: npt.NDArray[np.uint8]) -> None:
        """Undo ``register``. No copy of this memory may be pending."""

    def copy(self, stream: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each pair's second tensor to its first, between page-locked and device memory."""
        with self._accelerator.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def launch(self, stream: Any, kernel: Callable[..., object], *arguments: Any) -> None:
        """Call ``kernel(*arguments)`` so that its work runs in the stream."""
        with self._accelerator.stream(stream):
            kernel(*arguments)
