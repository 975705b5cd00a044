"""Runs a process's calls to the hub off the engine's thread."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeAlias, TypeVar

from blendhub.client.hub_client import HubClient
from blendhub.client.session import PendingReply
from blendhub.client.wire import Found
from blendhub.core.errors import BlendHubError, Busy, DeadlineExceeded, PeerGone
from blendhub.framework.host import PluginHost
from blendhub.vllm.messages import HubPlace

log = logging.getLogger(__name__)
T = TypeVar("T")
RunCall: TypeAlias = Callable[[Callable[[HubClient], None]], "Future[None]"]
"""The type of ``HubExecutor.run``, for callers that need no answer."""

RETRY_S = 1.0
"""How often a hub that could not be reached is tried again."""

LATE_S = 0.01
"""How often late answers are looked for."""

LEAVE_S = 1.0
"""How long ``close`` waits for the remaining calls and for the end of the session."""


class HubExecutor:
    """This process's client of the hub, and one thread that runs its calls in order.

    The thread registers with the hub first, and tries again until that succeeds. Methods return at once, except
    ``reach`` and ``close``.
    """

    def __init__(self, place: HubPlace, engine: str, rank: int, host: PluginHost) -> None:
        self.registered: HubClient | None = None
        """The client, once it has registered."""
        self.place = place
        self._engine = engine
        self._rank = rank
        self._host = host
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._late: list[tuple[HubClient, PendingReply[Found]]] = []
        self._lock = threading.Lock()
        """Guards the next two fields; never held during a call."""
        self._client: HubClient | None = None
        """The client, which may still be registering."""
        self._is_closed = False
        self._reached: Future[None] = Future()
        """The result of the first attempt to reach the hub."""
        self._unreached: BlendHubError | None = None
        """Why the last attempt failed; None if it succeeded."""
        self._clears = self._cleared = 0
        """The number of clears that were requested, and the number that are done."""
        self._thread = threading.Thread(target=self._run, name="blendhub-executor", daemon=True)
        self._thread.start()

    def reach(self) -> None:
        """Wait for the first attempt to reach the hub. An absent hub is tried again; other errors are raised."""
        self._reached.result()

    @property
    def has_tried(self) -> bool:
        """Whether the first attempt to reach the hub is over."""
        return self._reached.done()

    @property
    def is_up(self) -> bool:
        """Whether the hub answered the last call."""
        return self.registered is not None and self.registered.is_up

    def client(self) -> HubClient | None:
        """The client; None during the first attempt to reach the hub, and while a clear is not done.

        Raises PeerGone if the hub is known not to answer.
        """
        if not self.has_tried:
            return None
        client = self._checked_client()
        return None if self._clears > self._cleared else client

    def run(self, work: Callable[[HubClient], T]) -> "Future[T]":
        """Run a call that waits for the hub."""
        future: Future[T] = Future()
        clears = self._clears

        def do() -> None:
            try:
                client = self._checked_client()
                if clears > self._cleared:
                    raise PeerGone("the hub has not cleared the cache yet")
                future.set_result(work(client))
            except Exception as error:
                future.set_exception(error)

        self._work.put(do)
        return future

    def run_later(self, work: Callable[[], None]) -> None:
        """Run a function that does not raise."""
        self._work.put(work)

    def release_late(self, client: HubClient, reply: PendingReply[Found]) -> None:
        """End the lease that this answer brings, if it still arrives."""
        self._work.put(partial(self._late.append, (client, reply)))

    def clear(self) -> None:
        """Clear all namespaces of the engine; no other call runs before that is done."""
        self._clears += 1
        self._work.put(self._clear)

    def close(self) -> None:
        """Run the remaining calls, if the hub answers, and leave the hub."""
        until = time.monotonic() + LEAVE_S
        self._work.put(None)
        self._thread.join(LEAVE_S)
        with self._lock:
            self._is_closed = True
            client = self._client
        if client:
            with contextlib.suppress(BlendHubError):
                client.close(max(until - time.monotonic(), 0.0))
        self._thread.join(LEAVE_S)

    # On the thread.

    def _run(self) -> None:
        self._reach()
        retry_at = time.monotonic() + RETRY_S
        while True:
            try:
                work = self._work.get(timeout=self._pause_s(retry_at))
            except Empty:
                pass
            else:
                if work is None:
                    return
                work()
            self._late = [late for late in self._late if not _is_released(*late)]
            if time.monotonic() >= retry_at:
                if self._unreached:
                    self._reach()
                elif self._clears > self._cleared:
                    self._clear()
                retry_at = time.monotonic() + RETRY_S

    def _pause_s(self, retry_at: float) -> float | None:
        """How long to wait for work; None: until there is work."""
        if self._late:
            return LATE_S
        if self._unreached or self._clears > self._cleared:
            return max(0.0, retry_at - time.monotonic())
        return None

    def _reach(self) -> None:
        try:
            self.registered = self._register()
        except (PeerGone, DeadlineExceeded, Busy) as error:
            if self._unreached is None:
                log.warning(
                    "BlendHub: the hub at %s does not answer: %s. Requests are served without reuse; the hub is tried "
                    "again every %.0f s, and used when it answers",
                    self.place.address.endpoint, error, RETRY_S,
                )  # fmt: skip
            self._unreached = error
        except BlendHubError as error:
            if not self._reached.done():
                self._reached.set_exception(error)
            elif str(error) != str(self._unreached):
                log.warning("BlendHub: the hub at %s refuses this engine: %s", self.place.address.endpoint, error)
            self._unreached = error
        else:
            if self._unreached:
                log.info("BlendHub: the hub at %s answers; it is used from now on", self.place.address.endpoint)
            self._unreached = None
        if not self._reached.done():
            self._reached.set_result(None)

    def _clear(self) -> None:
        asked = self._clears
        try:
            self._checked_client().clear()
            self._cleared = asked
        except BlendHubError as error:
            log.warning("BlendHub: the cache could not be cleared yet; nothing is reused until it is: %s", error)

    def _register(self) -> HubClient:
        address = self.place.address
        client = HubClient(address.endpoint, address.transport.name, address.transport.options, host=self._host)
        with self._lock:
            self._client = client
            is_closed = self._is_closed
        try:
            if is_closed:
                raise PeerGone("this process has left the hub")
            client.register(self._engine, self.place.namespace, self._rank)
        except BaseException:
            client.close()
            raise
        return client

    def _checked_client(self) -> HubClient:
        """Raises PeerGone at once if the hub is known not to answer."""
        client = self.registered
        if client is None:
            raise PeerGone(f"the hub at {self.place.address.endpoint} has not answered yet: {self._unreached}")
        client.check_up()
        return client


def _is_released(client: HubClient, reply: PendingReply[Found]) -> bool:
    if not reply.done():
        return False
    with contextlib.suppress(BlendHubError):
        found = reply.result()
        if found.lease is not None:
            client.submit_release(found.lease)
    return True
