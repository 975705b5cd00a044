"""What the device asks of a GPU, and nothing beyond it: streams, marks in them, copies, launches and pinned memory.

Nothing here makes the host wait but ``wait``.
"""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from blendhub.errors import Unsupported

log = logging.getLogger(__name__)

Arena: TypeAlias = npt.NDArray[np.uint8]


class Runtime(ABC):
    @abstractmethod
    def stream(self) -> Any:
        """A new stream, beside the engine's: what it is given runs in order."""

    @abstractmethod
    def mark(self, stream: Any = None) -> Any:
        """The end of what a stream was given so far; without a stream, of what the engine was, on this thread."""

    @abstractmethod
    def follow(self, stream: Any, mark: Any) -> None:
        """What the stream is given from now on begins when the mark is reached."""

    @abstractmethod
    def done(self, mark: Any) -> bool:
        """Whether the mark is reached. Never blocks."""

    @abstractmethod
    def wait(self, mark: Any) -> None:
        """Return when the mark is reached; the host then sees everything before it, and so does all that follows."""

    @abstractmethod
    def memory(self, nbytes: int) -> torch.Tensor:
        """Bytes of the GPU."""

    @abstractmethod
    def pinned(self, nbytes: int) -> torch.Tensor:
        """Bytes of the host. Once let go, they are used again only after the copies that were started with them."""

    @abstractmethod
    def register(self, arena: Arena) -> str | None:
        """Pin the arena, so that the GPU reads and writes it at its own address. Returns why it could not be."""

    @abstractmethod
    def unregister(self, arena: Arena) -> None:
        """Undo that. Nothing may be under way."""

    @abstractmethod
    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes between pinned memory and the GPU's."""

    @abstractmethod
    def launch(self, stream: Any, kernel: Any, grid: tuple[int, int, int], arguments: Mapping[str, Any]) -> None:
        """Run a kernel of Triton's."""


class CudaRuntime(Runtime):
    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise Unsupported(f"the pages lie on {device}, but device 'cuda' serves only GPUs; choose another device")
        self._device = device

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def mark(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        # Blocking: who waits for it sleeps, and leaves the core to others.
        event = torch.cuda.Event(blocking=True)
        event.record(stream or torch.cuda.current_stream(self._device))
        return event

    def follow(self, stream: torch.cuda.Stream, mark: torch.cuda.Event) -> None:
        stream.wait_event(mark)

    def done(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def register(self, arena: Arena) -> str | None:
        with torch.cuda.device(self._device):
            error = torch.cuda.cudart().cudaHostRegister(arena.ctypes.data, arena.size, 0)
            if int(error) == 0:
                return None
            # CUDA tells a failure once more to the next launch; this one may have it.
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device)
            return str(torch.cuda.cudart().cudaGetErrorString(error))

    def unregister(self, arena: Arena) -> None:
        torch.cuda.cudart().cudaHostUnregister(arena.ctypes.data)

    def copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def launch(
        self, stream: torch.cuda.Stream, kernel: Any, grid: tuple[int, int, int], arguments: Mapping[str, Any]
    ) -> None:
        with torch.cuda.stream(stream):
            kernel[grid](**arguments)


class PinnedArena:
    """An arena's bytes, as fast to copy from and to as this machine allows."""

    def __init__(self, arena: Arena, runtime: Runtime) -> None:
        self.bytes = arena
        self.address = arena.ctypes.data
        self._runtime = runtime
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch knows no read-only tensors; we save to none
            self.tensor = torch.from_numpy(arena)
        why_not = runtime.register(arena)
        self.is_registered = why_not is None
        if why_not:
            log.warning(
                "the arena of %d MiB could not be pinned (%s), so it is copied in small pinned pieces, more slowly; "
                "a container needs a higher limit of locked memory: ulimit -l unlimited",
                arena.size >> 20,
                why_not,
            )

    def close(self) -> None:
        if self.is_registered:
            self._runtime.unregister(self.bytes)
