"""Calls that may hang, as those of a mount whose server is away: made in threads that a caller can leave behind."""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from blendhub.core.errors import StoreAway

T = TypeVar("T")
AT_ONCE = 4
"""Calls that are under way at a time, those that hang included."""


class Left(Exception):
    """The caller no longer waits for the work, so the work is to end."""


class WatchedWork(Generic[T]):
    """The work of a thread for a caller, step by step."""

    def __init__(self) -> None:
        self.result: Future[T] = Future()
        self._lock = threading.Lock()
        self._stepped_at = time.monotonic()
        self._left = False

    def step(self, then: Callable[[], object] = lambda: None) -> None:
        """A step was done; do ``then``, which only work that is waited for may do. Raises Left if it is not."""
        with self._lock:
            if self._left:
                raise Left
            self._stepped_at = time.monotonic()
            then()

    def wait(self, silence_s: float) -> bool:
        """Wait for the result. False: there was no step for so long, and no ``then`` is done from now on."""
        while not self.result.done():
            with self._lock:
                left_s = self._stepped_at + silence_s - time.monotonic()
                self._left = left_s <= 0
            if self._left:
                return False
            with contextlib.suppress(TimeoutError):
                self.result.exception(left_s)
        return True


class Watched:
    """Makes calls in threads. A call that hangs stays behind with its thread; there are a few such threads at most."""

    def __init__(self, place: str, silence_s: float) -> None:
        self._place = place
        self._silence_s = silence_s
        self.hung = 0
        """Calls that were left behind, so far."""
        self._changed = threading.Condition()
        """Guards the fields above and below."""
        self._under_way: set[WatchedWork[Any]] = set()
        self._left: set[WatchedWork[Any]] = set()

    def run(self, work: Callable[[WatchedWork[T]], T]) -> T:
        """The result of the work. Raises StoreAway if it makes no step for ``silence_s``, or if too many calls hang."""
        call: WatchedWork[T] = WatchedWork()
        self._begin(call)
        try:
            threading.Thread(target=self._do, args=[call, work], name="blendhub-files", daemon=True).start()
        except RuntimeError as error:  # a limit of processes
            self._ended(call)
            raise StoreAway(f"no thread could be started for {self._place}: {error}") from error
        if call.wait(self._silence_s):
            return call.result.result()
        with self._changed:
            self.hung += 1
            self._left.add(call)
            self._changed.notify_all()
        raise StoreAway(f"{self._place} did nothing for {self._silence_s:g} s; does its server run?")

    def _begin(self, call: WatchedWork[Any]) -> None:
        with self._changed:
            # If all of them hang, no caller waits for its turn: the place is away.
            self._changed.wait_for(
                lambda: len(self._under_way) < AT_ONCE or self._under_way <= self._left, self._silence_s
            )
            if len(self._under_way) >= AT_ONCE:
                raise StoreAway(f"{AT_ONCE} calls of {self._place} are under way or hang; does its server run?")
            self._under_way.add(call)

    def _do(self, call: WatchedWork[T], work: Callable[[WatchedWork[T]], T]) -> None:
        try:
            call.result.set_result(work(call))
        except BaseException as error:
            call.result.set_exception(error)
        self._ended(call)

    def _ended(self, call: WatchedWork[Any]) -> None:
        with self._changed:
            self._under_way.discard(call)
            self._left &= self._under_way
            self._changed.notify()
