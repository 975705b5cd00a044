"""Runs a server's requests: a bounded number of each connection, none past its deadline, each answered once."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from blendhub.contracts.transport import Envelope, Peer, Service
from blendhub.core.errors import BlendHubError, Busy, DeadlineExceeded, PeerGone, ServiceFailed

log = logging.getLogger("blendhub.transports")

Outcome: TypeAlias = Envelope | BlendHubError
Reply: TypeAlias = Callable[[Outcome], None]
"""Sends the outcome of a request to its caller."""

LONGEST_S = 30 * 86400.0
GRACE_S = 1.0
"""How long a closing server waits for cancelled requests to unwind."""


class _Running(NamedTuple):
    peer: Peer
    request: Envelope
    deadline: float
    reply: Reply
    timer: asyncio.TimerHandle


class Dispatcher:
    """Runs the requests of one server. Everything happens on the event loop."""

    def __init__(self, service: Service, max_pending: int, endpoint: str) -> None:
        self._service = service
        self._max_pending = max_pending
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._running: dict[asyncio.Future[Any], _Running] = {}
        self._pending: Counter[Peer] = Counter()
        """How many requests of each connection are running."""

    def dispatch(self, peer: Peer, request: Envelope, deadline: float, reply: Reply) -> None:
        """Have ``request`` handled and replied to, now or later, by a deadline on the clock ``time.monotonic``."""
        remaining = min(deadline - time.monotonic(), LONGEST_S)
        if not remaining > 0:  # or no number at all
            return reply(DeadlineExceeded(f"{self._endpoint}: the deadline passed in the queue; not started"))
        if self._pending[peer] >= self._max_pending:
            return reply(
                Busy(
                    f"{self._endpoint} has {self._max_pending} requests of this connection under way, as many as "
                    "max_pending allows; try again later"
                )
            )
        try:
            outcome = self._service.handle(peer, request)
            if isinstance(outcome, Envelope):
                return reply(outcome)
            task = asyncio.ensure_future(outcome)
        except Exception as error:
            return reply(self._reportable(error, request))
        # Without a timer a request that never ends would hold its place for good.
        timer = self._loop.call_later(remaining, task.cancel)
        self._running[task] = _Running(peer, request, deadline, reply, timer)
        self._pending[peer] += 1
        task.add_done_callback(self._finished)
        return None

    def peer_gone(self, peer: Peer) -> None:
        """Report to the service that a peer left."""
        try:
            self._service.gone(peer)
        except Exception:
            log.exception("%s: Service.gone failed", self._endpoint)

    async def close(self) -> None:
        """Cancel the requests under way; their callers get PeerGone."""
        requests, self._running = self._running, {}
        for task, running in requests.items():
            task.cancel()
            running.timer.cancel()
            running.reply(PeerGone(f"{self._endpoint} closed before it replied; connect again when it is back"))
        if requests:
            await asyncio.wait(requests, timeout=GRACE_S)

    def _finished(self, task: "asyncio.Future[Any]") -> None:
        running = self._running.pop(task, None)
        if running is None:  # close() replied; asyncio logs an exception that was never retrieved
            if not task.cancelled():
                task.exception()
            return
        running.timer.cancel()
        self._pending[running.peer] -= 1
        if not self._pending[running.peer]:
            del self._pending[running.peer]
        running.reply(self._outcome(task, running))

    def _outcome(self, task: "asyncio.Future[Any]", running: _Running) -> Outcome:
        """The result that the caller of a finished request gets."""
        if task.cancelled():
            if time.monotonic() >= running.deadline:
                return DeadlineExceeded(f"{self._endpoint}: the request was cancelled at its deadline")
            return service_failure(asyncio.CancelledError("the request was cancelled by the service"))
        if error := task.exception():
            return self._reportable(error, running.request)
        result = task.result()
        if isinstance(result, Envelope):
            return result
        return service_failure(TypeError(f"it replied with {result!r}, which is not an Envelope"))

    def _reportable(self, error: BaseException, request: Envelope) -> BlendHubError:
        """The error that the caller gets for ``error``."""
        if isinstance(error, BlendHubError):
            return error
        log.error("%s: %s failed", self._endpoint, type(request.message).__name__, exc_info=error)
        return service_failure(error)


def service_failure(error: BaseException) -> ServiceFailed:
    """The error that the caller gets for an exception that is not a BlendHubError."""
    return ServiceFailed(f"the service raised {type(error).__name__}: {error}; its log has the details")
