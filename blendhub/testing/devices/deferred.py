"""Runtimes without an accelerator: all work is deferred until something waits for it. Needs torch."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from blendhub.devices import Runtime


@dataclass(eq=False)
class Task:
    """Work that was submitted to a stream. It serves as its own event."""

    stream: "DeferredStream"
    run: Callable[[], object]
    after: "Task | None" = None
    memory: tuple[range, ...] = ()
    """The addresses that a copy reads and writes."""
    inference_mode: bool = field(default_factory=torch.is_inference_mode_enabled)
    """Whether the thread that submitted the work was in it: there torch decides which tensors may be written."""
    done: bool = False


class DeferredStream:
    def __init__(self) -> None:
        self.pending: deque[Task] = deque()

    def submit(
        self, run: Callable[[], object] = lambda: None, after: Task | None = None, memory: tuple[range, ...] = ()
    ) -> Task:
        self.pending.append(Task(self, run, after, memory))
        return self.pending[-1]


class DeferredRuntime(Runtime):
    """Runs copies and kernels on the CPU, and each only when an event that depends on it is waited for.

    So a device that forgets to wait reads unchanged bytes every time, and one that reuses a buffer too early changes
    what a pending copy has yet to read. Memory is host memory. Kernels must run on the host, for example in Triton's
    interpreter.

    A thread that has not set its device is refused, as an NPU refuses it. Without ``host_pointers``, a kernel that gets
    memory of the arena fails, as on a GPU under WSL2.
    """

    registration_bytes = 2**14

    _lock: ClassVar = threading.RLock()
    """Tasks run one at a time in the whole process: interpreters of kernels are not thread-safe."""

    def __init__(self, register_error: str | None = None, host_pointers: bool = True) -> None:
        super().__init__(torch.device("cpu"), None)
        self.kernels_reach_registered_memory = host_pointers
        self.engine = DeferredStream()
        """The engine's stream. Tests submit the engine's work to it."""
        self.registered: list[range] = []
        """Addresses of memory that is registered."""
        self._register_error = register_error
        self._streams: list[DeferredStream] = []
        self._allocated: set[int] = set()
        self.errors: list[str] = []
        """The errors in threads that have no caller to raise them to."""
        self._devices = threading.local()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No task of any stream runs meanwhile."""
        with self._lock:
            yield

    def set_device(self) -> None:
        self._devices.is_set = True

    def create_stream(self) -> DeferredStream:
        self._check_thread()
        self._streams.append(DeferredStream())
        return self._streams[-1]

    def record_event(self, stream: DeferredStream | None = None) -> Task:
        self._check_thread()
        with self._lock:
            return (stream or self.engine).submit()

    def wait_event(self, stream: DeferredStream | None, event: Task) -> None:
        self._check_thread()
        with self._lock:
            (stream or self.engine).submit(after=event)

    def query(self, event: Task) -> bool:
        """Each query runs one task, so that polling ends."""
        self._check_thread()
        with self._lock:
            if not event.done:
                self._run_one_task_before(event)
            return event.done

    def synchronize(self, event: Task) -> None:
        self._check_thread()
        with self._lock:
            while not event.done:
                self._run_one_task_before(event)

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._check_thread()
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self._allocated.add(memory.untyped_storage().data_ptr())
        return memory

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        return self.allocate(nbytes)

    def register(self, memory: npt.NDArray[np.uint8]) -> str | None:
        self._check_thread()
        assert memory.size <= self.registration_bytes
        memory[::4096].sum()  # page-locking makes pages: behind what is reserved, memory for them may be missing
        if self._register_error is None:
            self.registered.append(_addresses_of(memory))
        return self._register_error

    def unregister(self, memory: npt.NDArray[np.uint8]) -> None:
        self._check_thread()
        addresses = _addresses_of(memory)
        with self._lock:
            pending = [part for stream in self._streams for task in stream.pending for part in task.memory]
        if any(part.start < addresses.stop and addresses.start < part.stop for part in pending):
            self.errors.append("memory was unregistered while copies of it were pending")
        self.registered.remove(addresses)

    def copy(self, stream: DeferredStream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._check_thread()
        for target, source in pairs:
            memory = self._copied(target), self._copied(source)
            with self._lock:
                stream.submit(partial(target.copy_, source), memory=memory)

    def launch(self, stream: DeferredStream, kernel: Callable[..., object], *arguments: Any) -> None:
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]

        def run() -> None:
            reached = [tensor for tensor in tensors if any(tensor.data_ptr() in part for part in self.registered)]
            if reached and not self.kernels_reach_registered_memory:
                raise RuntimeError("a kernel was given an address of the host, which is none of the device")
            # Interpreters compute masked items with NumPy, too, and these may be anything.
            with np.errstate(all="ignore"):
                kernel(*arguments)

        self._check_thread()
        with self._lock:
            stream.submit(run)

    def _copied(self, memory: torch.Tensor) -> range:
        """The addresses of memory that may be copied: it was allocated here, or registered by one call."""
        addresses = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
        is_own = memory.untyped_storage().data_ptr() in self._allocated
        if not is_own and not any(
            part.start <= addresses.start and addresses.stop <= part.stop for part in self.registered
        ):
            raise RuntimeError("a copy was given memory that is not pinned, or that was pinned by two calls")
        return addresses

    def _check_thread(self) -> None:
        if not getattr(self._devices, "is_set", False):
            raise RuntimeError(f"thread {threading.current_thread().name!r} has not set its device")

    def _run_one_task_before(self, event: Task) -> None:
        """Run the first pending task that the event depends on."""
        task = event.stream.pending[0]
        while task.after is not None and not task.after.done:
            task = task.after.stream.pending[0]
        with torch.inference_mode(task.inference_mode):
            task.run()
        task.done = True
        task.stream.pending.popleft()


def _addresses_of(memory: npt.NDArray[np.uint8]) -> range:
    return range(memory.ctypes.data, memory.ctypes.data + memory.size)
