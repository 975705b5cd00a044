"""Runs a process's calls to the hub off the engine's thread."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from blendhub.client import HubClient, PendingReply
from blendhub.errors import BlendHubError, Busy, DeadlineExceeded, PeerGone
from blendhub.layout import Namespace
from blendhub.vllm.sessions import Sessions
from blendhub.wire import Found

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_S = 1.0
"""How often a hub that could not be reached is tried again."""

LATE_S = 0.01
"""How often late answers are looked for."""

LEAVE_S = 1.0
"""How long ``close`` waits for the remaining calls."""


class HubExecutor:
    """One thread runs the calls in order. It registers with the hub first, and tries again until that succeeds.

    Methods return at once, except ``reach`` and ``close``.
    """

    def __init__(self, sessions: Sessions, home: Namespace) -> None:
        self._sessions = sessions
        self._home_namespace = home
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._late: list[tuple[HubClient, PendingReply[Found]]] = []
        self._opening: dict[str, Future[HubClient]] = {}
        self._reached: Future[None] = Future()
        """The result of the first attempt to reach the hub."""
        self._unreached: BlendHubError | None = None
        """Why the last attempt failed; None if it succeeded."""
        self._clears = self._cleared = 0
        """How many clears were requested, and how many are done."""
        self._thread = threading.Thread(target=self._run, name="blendhub-executor", daemon=True)
        self._thread.start()

    def reach(self) -> None:
        """Wait for the first attempt to reach the hub. An absent hub is tried again; other errors are raised."""
        self._reached.result()

    @property
    def is_up(self) -> bool:
        """Whether the hub answered the last call."""
        return self.home is not None and self.home.is_up

    @property
    def home(self) -> HubClient | None:
        """The session of requests without LoRA and salt, if it is open."""
        return self._sessions.ready(self._home_namespace)

    def client(self, namespace: Namespace) -> HubClient | None:
        """The session of a namespace; None while it is being opened. Raises what keeps it from that.

        To be called by the engine's thread alone.
        """
        if not self._reached.done():
            return None
        self._check_up()
        if self._clears > self._cleared:
            return None
        client = self._sessions.ready(namespace)
        if client is None:
            opening = self._opening.get(namespace.digest)
            if opening is None:
                self._opening[namespace.digest] = self.run(namespace, lambda opened: opened)
            elif opening.done():
                del self._opening[namespace.digest]
                opening.result()
            return None
        self._opening.pop(namespace.digest, None)
        if not client.is_up:
            raise PeerGone("the hub does not answer, or the session is being registered anew")
        return client

    def run(self, namespace: Namespace, work: Callable[[HubClient], T]) -> "Future[T]":
        """Run a call that waits for the hub."""
        future: Future[T] = Future()
        clears = self._clears

        def do() -> None:
            try:
                self._check_up()
                if clears > self._cleared:
                    raise PeerGone("the hub has not cleared the cache yet")
                future.set_result(work(self._sessions.open(namespace)))
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
        """Clear the engine's namespaces; no other call runs before that is done."""
        self._clears += 1
        self._work.put(self._clear)

    def close(self) -> None:
        """Run the remaining calls, if the hub answers, and leave the hub."""
        self._work.put(None)
        self._thread.join(LEAVE_S)
        self._sessions.close()
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
        """How long to wait for work; None: until there is some."""
        if self._late:
            return LATE_S
        if self._unreached or self._clears > self._cleared:
            return max(0.0, retry_at - time.monotonic())
        return None

    def _reach(self) -> None:
        try:
            self._sessions.open(self._home_namespace)
        except (PeerGone, DeadlineExceeded, Busy) as error:
            if self._unreached is None:
                log.warning(
                    "BlendHub: the hub at %s does not answer: %s. Requests are served without reuse; the hub is tried "
                    "again every %.0f s, and used when it answers",
                    self._sessions.address.endpoint, error, RETRY_S,
                )  # fmt: skip
            self._unreached = error
        except BlendHubError as error:
            if not self._reached.done():
                self._reached.set_exception(error)
            elif str(error) != str(self._unreached):
                log.warning("BlendHub: the hub at %s refuses this engine: %s", self._sessions.address.endpoint, error)
            self._unreached = error
        else:
            if self._unreached:
                log.info("BlendHub: the hub at %s answers; it is used from now on", self._sessions.address.endpoint)
            self._unreached = None
        if not self._reached.done():
            self._reached.set_result(None)

    def _clear(self) -> None:
        asked = self._clears
        try:
            self._check_up()
            self._sessions.clear()
            self._cleared = asked
        except BlendHubError as error:
            log.warning("BlendHub: the cache could not be cleared yet; nothing is reused until it is: %s", error)

    def _check_up(self) -> None:
        """Raise PeerGone at once if the hub is known not to answer."""
        home = self.home
        if home is None:
            raise PeerGone(f"the hub at {self._sessions.address.endpoint} has not answered yet: {self._unreached}")
        if not home.is_up:
            raise PeerGone("the hub does not answer, or the session is being registered anew")


def _is_released(client: HubClient, reply: PendingReply[Found]) -> bool:
    if not reply.done():
        return False
    with contextlib.suppress(BlendHubError):
        found = reply.result()
        if found.lease is not None:
            client.submit_release(found.lease)
    return True
