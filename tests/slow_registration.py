"""A runtime whose machine takes long to lock memory."""

import threading
import time
from typing import Any

from blendhub.testing.devices.deferred import DeferredRuntime

DEADLINE_S = 20.0


class SlowRegistration(DeferredRuntime):
    """A machine that takes long to lock memory: ``register`` waits until the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self._allowed = threading.Semaphore(0)
        self._calls = 0

    def register(self, memory: Any) -> str | None:
        self._calls += 1
        assert self._allowed.acquire(timeout=DEADLINE_S), f"the test did not allow call {self._calls} of register"
        return super().register(memory)

    def allow(self, n_calls: int) -> None:
        """Let calls return, and wait until the call after them waits."""
        number = self._calls + n_calls
        self.allow_soon(n_calls)
        self.wait_for_call(number)

    def allow_soon(self, n_calls: int) -> None:
        self._allowed.release(n_calls)

    def wait_for_call(self, number: int = 1) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self._calls < number:
            assert time.monotonic() < deadline, "the device does not register its arena"
            time.sleep(0.001)
