"""Runs a process's calls to the hub off the engine's thread."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeAlias, TypeVar

from blendhub.client.hub_client import HubClient
from blendhub.core.errors import BlendHubError, PeerGone
from blendhub.framework.host import PluginHost
from blendhub.vllm.messages import HubPlace

log = logging.getLogger(__name__)
T = TypeVar("T")
RunCall: TypeAlias = Callable[[Callable[[HubClient], None]], "Future[None]"]
"""The type of ``HubExecutor.run``, for callers that need no answer."""

RETRY_S = 1.0
"""How often a clear that failed is tried again."""

LEAVE_S = 1.0
"""How long ``close`` waits for the remaining calls and for the end of the session."""


class HubExecutor:
    """This process's client of the hub, which registers by itself, and one thread that runs its calls in order.

    Methods return at once, except ``reach`` and ``close``.
    """

    def __init__(self, place: HubPlace, engine: str, rank: int, host: PluginHost) -> None:
        self.place = place
        address = place.address
        self.client = HubClient(address.endpoint, address.transport.name, address.transport.options, host=host)
        """The client may be used once the first attempt to reach the hub is over."""
        self.client.register(engine, place.namespace, rank, waits=False)
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._clears = self._cleared = 0
        """The number of clears that were requested, and the number that are done."""
        self._thread = threading.Thread(target=self._run, name="blendhub-executor", daemon=True)
        self._thread.start()

    def reach(self) -> None:
        """Wait for the first attempt to reach the hub. An absent hub is tried again; other errors are raised."""
        self.client.reach()

    @property
    def has_tried(self) -> bool:
        """Whether the first attempt to reach the hub is over."""
        return self.client.has_tried

    @property
    def is_clearing(self) -> bool:
        """Whether the hub has yet to clear the cache: until then it would find what is to be forgotten."""
        return self._cleared < self._clears

    def run(self, work: Callable[[HubClient], T]) -> "Future[T]":
        """Run a call that waits for the hub."""
        future: Future[T] = Future()
        clears = self._clears

        def do() -> None:
            try:
                self.client._first_attempt.exception()
                if clears > self._cleared:
                    raise PeerGone("the hub has not cleared the cache yet")
                self.client.check_up()
                future.set_result(work(self.client))
            except Exception as error:
                future.set_exception(error)

        self._work.put(do)
        return future

    def run_later(self, work: Callable[[], None]) -> None:
        """Run a function that does not raise."""
        self._work.put(work)

    def clear(self) -> None:
        """Clear all namespaces of the engine; no other call runs before that is done."""
        self._clears += 1
        self._work.put(self._clear)

    def close(self) -> None:
        """Run the remaining calls, if the hub answers, and leave the hub."""
        until = time.monotonic() + LEAVE_S
        self._work.put(None)
        self._thread.join(LEAVE_S)
        self.client.close(max(until - time.monotonic(), 0.0))
        self._thread.join(LEAVE_S)

    # On the thread.

    def _run(self) -> None:
        while True:
            pause = RETRY_S if self.is_clearing else None
            with contextlib.suppress(Empty):
                work = self._work.get(timeout=pause)
                if work is None:
                    return
                work()
            if self.is_clearing and self._work.empty():
                self._clear()

    def _clear(self) -> None:
        n_clears = self._clears
        try:
            self.client.clear()
            self._cleared = n_clears
        except BlendHubError as error:
            log.warning("BlendHub: the cache could not be cleared yet; nothing is reused until it is: %s", error)
