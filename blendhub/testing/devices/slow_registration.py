"""A deferred runtime whose machine takes long to lock memory. Needs torch."""

import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from blendhub.testing.devices.deferred import DeferredRuntime

DEADLINE_S = 20.0


class SlowRegistration(DeferredRuntime):
    """``register`` waits until the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self._allowed = threading.Semaphore(0)
        self._calls = 0

    def register(self, memory: npt.NDArray[np.uint8]) -> str | None:
        self._calls += 1
        if not self._allowed.acquire(timeout=DEADLINE_S):
            raise TimeoutError(f"the test did not allow call {self._calls} of register")
        return super().register(memory)

    def allow(self, n_calls: int) -> None:
        """Let calls return, and wait until the call after them waits."""
        expected = self._calls + n_calls
        self.allow_soon(n_calls)
        self._wait_for(lambda: self._calls >= expected)

    def allow_soon(self, n_calls: int) -> None:
        self._allowed.release(n_calls)

    def wait_for_call(self) -> None:
        self._wait_for(lambda: self._calls > 0)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "the device does not register its arena"
            time.sleep(0.001)
