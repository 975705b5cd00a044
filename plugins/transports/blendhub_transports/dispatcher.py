"""Where a server's requests are worked on: a bounded number, none past its deadline, each answered once."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from blendhub.contracts.transport import Envelope, Peer, Service
from blendhub.errors import BlendHubError, Busy, DeadlineExceeded, PeerGone
from blendhub_transports.error_codec import service_failure

log = logging.getLogger("blendhub.transports")

Answer: TypeAlias = Callable[[Envelope | BlendHubError], None]

GRACE_S = 1.0
"""How long a closing server waits for cancelled requests to unwind."""


class Dispatcher:
    """Runs the requests of one server. Everything happens on the event loop."""

    def __init__(self, service: Service, max_pending: int, endpoint: str) -> None:
        self._service = service
        self._max_pending = max_pending
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._running: dict[asyncio.Future[Any], _Held] = {}

    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._running

    def take(self, peer: Peer, request: Envelope, remaining: float, answer: Answer) -> None:
        """Answer ``request``, now or later; ``remaining`` is how many seconds are left for it."""
        if remaining <= 0:
            return answer(DeadlineExceeded(f"{self._endpoint}: the deadline passed in the queue; not started"))
        if len(self._running) >= self._max_pending:
            return answer(
                Busy(
                    f"{self._endpoint} has {self._max_pending} requests under way, as many as max_pending allows; "
                    "try again later"
                )
            )
        try:
            reply = self._service.handle(peer, request)
            task = None if isinstance(reply, Envelope) else asyncio.ensure_future(reply)
        except Exception as error:
            return answer(self._told(error, request))
        if task is None:
            return answer(reply)
        # Read before the timer is set, which would otherwise go off before the deadline.
        deadline = time.monotonic() + remaining
        # Without a timer a request that never ends would hold its place for good.
        timer = self._loop.call_later(remaining, task.cancel)
        self._running[task] = _Held(request, deadline, answer, timer)
        task.add_done_callback(self._finished)
        return None

    def gone(self, peer: Peer) -> None:
        """Tell the service that a peer left."""
        try:
            self._service.gone(peer)
        except Exception:
            log.exception("%s: the service failed when it was told that a peer left", self._endpoint)

    async def close(self) -> None:
        """Cancel what is under way; its callers get PeerGone."""
        running, self._running = self._running, {}
        for task, held in running.items():
            task.cancel()
            held.timer.cancel()
            held.answer(PeerGone(f"{self._endpoint} closed before it replied; connect again when it is back"))
        if running:
            await asyncio.wait(running, timeout=GRACE_S)

    def _finished(self, task: "asyncio.Future[Any]") -> None:
        held = self._running.pop(task, None)
        if held is None:  # answered by close(); asyncio complains of an exception that nobody looked at
            if not task.cancelled():
                task.exception()
            return
        held.timer.cancel()
        if task.cancelled():
            late = time.monotonic() >= held.deadline
            sentence = f"{self._endpoint}: the request was cancelled {'at its deadline' if late else 'by the service'}"
            held.answer(DeadlineExceeded(sentence) if late else service_failure(asyncio.CancelledError(sentence)))
        elif error := task.exception():
            held.answer(self._told(error, held.request))
        elif isinstance(task.result(), Envelope):
            held.answer(task.result())
        else:
            held.answer(service_failure(TypeError(f"it replied with {task.result()!r}, which is not an Envelope")))

    def _told(self, error: BaseException, request: Envelope) -> BlendHubError:
        if isinstance(error, BlendHubError):
            return error
        log.error("%s: %s failed", self._endpoint, type(request.message).__name__, exc_info=error)
        return service_failure(error)


class _Held(NamedTuple):
    """What is kept of a request under way."""

    request: Envelope
    deadline: float
    answer: Answer
    timer: asyncio.TimerHandle
