"""The hub's answer to one request, which may not have come yet."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from blendhub.contracts.transport import Pending
from blendhub.core.errors import BlendHubError, ProtocolError, TransportError

if TYPE_CHECKING:
    from blendhub.client.session import HubSession

R = TypeVar("R")


class Answer(Generic[R]):
    """What a request came to: a reply or an error, at the latest when its timeout has passed. For one thread at a time.

    A lookup and a reservation bring a lease. The caller ends it by ``close``, whatever became of the request.
    """

    def __init__(self, session: "HubSession", request: Any, read: Callable[[Any], R], ends: int | None = None) -> None:
        """``read`` makes what ``result`` returns of the reply. ``ends``: the lease that the request ends."""
        self.request = request
        self.reply: R | None = None
        self.error: BlendHubError | None = None
        self.sent_at = 0.0
        """When the request was sent; 0 if it could not be."""
        self.pending: Pending | None = None
        """The transport's request, until its outcome is known here."""
        self._session = session
        self._registration = session.registrations
        self._read = read
        self._ends = ends

    def done(self, within: float = 0.0) -> bool:
        """Whether there is a reply or an error. Waits for that, but no longer than ``within`` seconds."""
        if self.pending and self.pending.done(within):
            try:
                self.reply = self._read(self.pending.result().message)
                self.pending = None
            except BlendHubError as error:
                self.fail(error)
                self._session.notice(error, self.request)
        return self.pending is None

    def result(self) -> R:
        """The reply; raises the error. Waits until the timeout, unless ``done``."""
        self.done(threading.TIMEOUT_MAX)
        if self.error:
            raise self.error
        return cast(R, self.reply)

    def sent(self, pending: Pending) -> None:
        self.sent_at, self.pending = time.monotonic(), pending

    def fail(self, error: BlendHubError) -> None:
        """The request could not be sent, or was answered with an error."""
        self.error, self.pending = error, None
        if self._ends is not None and isinstance(error, TransportError):
            self._session.abandon(self._ends)

    @property
    def has_ended(self) -> bool:
        """Whether the session has ended in which the request was sent, and with it the lease that it brought."""
        return self._session.registrations != self._registration

    def close(self) -> None:
        """End the lease that the answer brought, or still brings. The caller uses the answer no more."""
        self._session.close_answer(self)


def expecting(kind: type[R]) -> Callable[[Any], R]:
    """Reads a reply of this kind."""

    def read(reply: Any) -> R:
        if not isinstance(reply, kind):
            raise ProtocolError(f"the hub answered {type(reply).__name__} where {kind.__name__} was expected")
        return reply

    return read
