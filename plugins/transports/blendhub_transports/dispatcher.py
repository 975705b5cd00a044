"""Runs a server's requests: a bounded number at once, none past its deadline, each answered once."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from blendhub.contracts.transport import Envelope, Peer, Service
from blendhub.core.errors import BlendHubError, Busy, DeadlineExceeded, PeerGone, ServiceFailed

log = logging.getLogger("blendhub.transports")

Reply: TypeAlias = Callable[[Envelope | BlendHubError], None]
"""Sends the outcome of a request to its caller."""

GRACE_S = 1.0
"""How long a closing server waits for cancelled requests to unwind."""


class _Running(NamedTuple):
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

    def dispatch(self, peer: Peer, request: Envelope, remaining: float, reply: Reply) -> None:
        """Have ``request`` handled and replied to, now or later, within ``remaining`` seconds."""
        if remaining <= 0:
            return reply(DeadlineExceeded(f"{self._endpoint}: the deadline passed in the queue; not started"))
        if len(self._running) >= self._max_pending:
            limit = f"{self._max_pending} requests under way, as many as max_pending allows"
            return reply(Busy(f"{self._endpoint} has {limit}; try again later"))
        try:
            outcome = self._service.handle(peer, request)
            if not isinstance(outcome, Envelope):
                outcome = asyncio.ensure_future(outcome)
        except Exception as error:
            return reply(self._reportable(error, request))
        if isinstance(outcome, Envelope):
            return reply(outcome)
        task = outcome
        # Read before the timer is set, which would otherwise go off before the deadline.
        deadline = time.monotonic() + remaining
        # Without a timer a request that never ends would hold its place for good.
        timer = self._loop.call_later(remaining, task.cancel)
        self._running[task] = _Running(request, deadline, reply, timer)
        task.add_done_callback(self._finished)
        return None

    def peer_met(self, peer: Peer, pid: int) -> None:
        """Report to the service which process a new peer is."""
        try:
            self._service.met(peer, pid)
        except Exception:
            log.exception("%s: Service.met failed", self._endpoint)

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
        if running is not None:
            running.timer.cancel()
            running.reply(self._outcome(task, running))
        elif not task.cancelled():  # close() replied; asyncio logs an exception that was never retrieved
            task.exception()

    def _outcome(self, task: "asyncio.Future[Any]", running: _Running) -> Envelope | BlendHubError:
        """The result that the caller of a finished request gets."""
        if task.cancelled():
            if time.monotonic() >= running.deadline:
                return DeadlineExceeded(f"{self._endpoint}: the request was cancelled at its deadline")
            sentence = f"{self._endpoint}: the request was cancelled by the service"
            return service_failure(asyncio.CancelledError(sentence))
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
