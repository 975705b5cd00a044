"""A runtime without a GPU, for tests: kernels run in Triton's interpreter, and nothing runs until something waits.

Then that alone runs which the mark depends on. So whoever forgets to wait finds the bytes unchanged every time, and
whoever touches a buffer too early has changed what a copy under way has yet to read.

Set ``TRITON_INTERPRET=1`` before :mod:`blendhub_cuda.kernels` is imported.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from blendhub_cuda.runtime import Arena, Runtime


class Task:
    """Something that a stream was given. It is its own mark."""

    def __init__(self, stream: "Stream", run: Callable[[], object], after: "Task | None" = None) -> None:
        self.stream = stream
        self.run = run
        self.after = after
        self.ran = False


class Stream:
    def __init__(self) -> None:
        self.waiting: deque[Task] = deque()

    def give(self, run: Callable[[], object], after: Task | None = None) -> Task:
        task = Task(self, run, after)
        self.waiting.append(task)
        return task


class DeferredRuntime(Runtime):
    interpreter: ClassVar = threading.RLock()
    """Triton's interpreter runs one kernel at a time."""

    def __init__(self, device: torch.device, why_not_registered: str | None = None) -> None:
        self.engine = Stream()
        """What tests give this runs as the engine's own work does."""
        self.registered: list[int] = []
        self._why_not_registered = why_not_registered
        self._streams = [self.engine]

    def stream(self) -> Stream:
        self._streams.append(Stream())
        return self._streams[-1]

    def mark(self, stream: Stream | None = None) -> Task:
        with self.interpreter:
            return (stream or self.engine).give(_nothing)

    def follow(self, stream: Stream, mark: Task) -> None:
        with self.interpreter:
            stream.give(_nothing, mark)

    def done(self, mark: Task) -> bool:
        """Time passes for who polls: one task runs for each poll."""
        with self.interpreter:
            if not mark.ran:
                self._advance(mark)
            return mark.ran

    def wait(self, mark: Task) -> None:
        with self.interpreter:
            while not mark.ran:
                self._advance(mark)

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def register(self, arena: Arena) -> str | None:
        if self._why_not_registered is None:
            self.registered.append(arena.ctypes.data)
        return self._why_not_registered

    def unregister(self, arena: Arena) -> None:
        assert not any(stream.waiting for stream in self._streams[1:]), "copies of the arena are still under way"
        self.registered.remove(arena.ctypes.data)

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        with self.interpreter:
            stream.give(lambda: target.copy_(source))

    def launch(self, stream: Stream, kernel: Any, grid: tuple[int, int, int], arguments: Mapping[str, Any]) -> None:
        def run() -> None:
            with np.errstate(all="ignore"):
                kernel[grid](**arguments)

        with self.interpreter:
            stream.give(run)

    def _advance(self, mark: Task) -> None:
        """Run the first task that stands before the mark."""
        task = mark.stream.waiting[0]
        while task.after is not None and not task.after.ran:
            task = task.after.stream.waiting[0]
        task.run()
        task.ran = True
        task.stream.waiting.popleft()


def _nothing() -> None:
    pass
