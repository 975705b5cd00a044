"""Runs a server's requests: a bounded number of each connection, none past its deadline, each answered once."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from blendhub.contracts.transport import Envelope, Peer, Service
from blendhub.core.errors import BlendHubError, Busy, DeadlineExceeded, PeerGone, ServiceFailed

log = logging.getLogger("blendhub.transports")

Outcome: TypeAlias = Envelope | BlendHubError
Reply: TypeAlias = Callable[[Outcome], None]
"""Sends the outcome of a request to its caller."""

LONGEST_S = 30 * 86400.0
GRACE_S = 1.0
"""How long a closing server waits for cancelled requests to unwind."""


class Dispatcher:
    """Runs the requests of one server. Everything happens on the event loop."""

    def __init__(self, service: Service, max_pending: int, endpoint: str) -> None:
        self._service = service
        self._max_pending = max_pending
        self._endpoint = endpoint
        self._running: set[asyncio.Task[None]] = set()
        self._pending: Counter[Peer] = Counter()
        """How many requests of each connection are running."""
        self._is_closing = False

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
            answer = self._service.handle(peer, request)
        except Exception as error:
            return reply(self._reportable(error, request))
        if isinstance(answer, Envelope):
            return reply(answer)
        self._pending[peer] += 1
        task = asyncio.ensure_future(self._finish(peer, request, answer, remaining, reply))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return None

    def peer_gone(self, peer: Peer) -> None:
        """Report to the service that a peer left."""
        try:
            self._service.gone(peer)
        except Exception:
            log.exception("%s: Service.gone failed", self._endpoint)

    async def close(self) -> None:
        """Cancel the requests under way; their callers get PeerGone."""
        self._is_closing = True
        await asyncio.sleep(0)  # a task that has not begun would end without a reply
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=GRACE_S)

    async def _finish(
        self, peer: Peer, request: Envelope, answer: Awaitable[Envelope], remaining: float, reply: Reply
    ) -> None:
        outcome: Outcome
        # Without a deadline a request that never ends would hold its place for good.
        deadline = asyncio.timeout(remaining)
        try:
            async with deadline:
                outcome = await answer
            if not isinstance(outcome, Envelope):
                outcome = service_failure(TypeError(f"it replied with {outcome!r}, which is not an Envelope"))
        except (Exception, asyncio.CancelledError) as error:
            if deadline.expired():
                outcome = DeadlineExceeded(f"{self._endpoint}: the request was cancelled at its deadline")
            elif self._is_closing:
                outcome = PeerGone(f"{self._endpoint} closed before it replied; connect again when it is back")
            else:
                outcome = self._reportable(error, request)
        self._pending[peer] -= 1
        if not self._pending[peer]:
            del self._pending[peer]
        reply(outcome)

    def _reportable(self, error: BaseException, request: Envelope) -> BlendHubError:
        """The error that the caller gets for ``error``."""
        if isinstance(error, BlendHubError):
            return error
        log.error("%s: %s failed", self._endpoint, type(request.message).__name__, exc_info=error)
        return service_failure(error)


def service_failure(error: BaseException) -> ServiceFailed:
    """The error that the caller gets for an exception that is not a BlendHubError."""
    return ServiceFailed(f"the service raised {type(error).__name__}: {error}; its log has the details")
