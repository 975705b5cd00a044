"""What clients of frames share: a connection, and its line to one server, which ends with that server."""

import itertools
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

from blendhub.contracts.transport import Buffer, Codec, Connection, Envelope
from blendhub.core.errors import BlendHubError, Busy, PeerGone, ProtocolError
from blendhub_transports import frames
from blendhub_transports.pending import PendingRequest


class Line(ABC):
    """The requests that were sent to one server. A line never connects again: what it holds is for no other server.

    A subclass sends and reads frames, and calls ``_end`` once nothing more can come.
    """

    def __init__(self, endpoint: str, codec: Codec) -> None:
        self._endpoint = endpoint
        self._codec = codec
        self._lock = threading.Lock()
        """Guards the next two, and what a subclass sends with."""
        self._pending: dict[int, PendingRequest] = {}
        self.is_over = False
        self._error: BlendHubError = PeerGone(f"this connection to {endpoint} was closed before the reply")
        """Why the line is over."""

    def submit(self, pending: PendingRequest, parts: list[Buffer], max_pending: int) -> None:
        with self._lock:
            if self.is_over:
                raise self._error
            if len(self._pending) >= max_pending:
                raise Busy(
                    f"this connection to {self._endpoint} has {max_pending} requests under way, all that max_pending "
                    "allows"
                )
            self._pending[pending.number] = pending
            self._send(parts)

    @abstractmethod
    def _send(self, parts: list[Buffer]) -> None:
        """Send frames without waiting for the server; called with the lock."""

    @abstractmethod
    def close(self) -> None:
        """Have the line end. Closing twice is fine."""

    def _settle(self, parts: Sequence[memoryview]) -> None:
        """Give the answer in these frames to its request; to be called with the lock."""
        try:
            header = frames.read_header(parts[0] if parts else memoryview(b""))
        except ProtocolError:  # nothing says whose it is
            return
        outcome: Envelope | BlendHubError
        try:
            outcome = frames.decode(header, parts, self._codec, reader="the client", writer="the server")
        except BlendHubError as error:
            outcome = error
        if pending := self._pending.pop(header.number, None):
            pending.settle(outcome)

    def _end(self, why: BlendHubError | None) -> None:
        """End all requests, since the server left, or for no reason, the connection was closed; to be called with the
        lock.
        """
        self._error = why or self._error
        self.is_over = True
        for pending in self._pending.values():
            pending.settle(self._error)
        self._pending.clear()


class LineConnection(Connection, ABC):
    """Reaches the server with the first request, and the next server with the first request after a server left."""

    def __init__(self, endpoint: str, codec: Codec, max_pending: int) -> None:
        self._endpoint = endpoint
        self._codec = codec
        self._max_pending = max_pending
        self._process = os.getpid()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        """Guards the next two; held for moments only, never while a server is waited for."""
        self._line: Line | None = None
        self._is_closed = False

    @abstractmethod
    def _connect(self) -> Line:
        """A new line, made without waiting for the server; raises why there can be none."""

    def submit(self, request: Envelope, timeout: float) -> PendingRequest:
        pending = PendingRequest(next(self._numbers), self._endpoint, timeout)
        message, version = self._codec.encode(request.message), self._codec.version
        parts = frames.encode(version, frames.REQUEST, pending.number, pending.deadline, message, request.payload)
        if os.getpid() != self._process:
            raise PeerGone(f"this connection to {self._endpoint} belongs to the process that this one forked from")
        with self._lock:
            if self._is_closed:
                raise PeerGone(f"this connection to {self._endpoint} was closed")
            if self._line is None or self._line.is_over:
                self._line = self._connect()
            line = self._line
        line.submit(pending, parts, self._max_pending)
        return pending

    def close(self) -> None:
        if os.getpid() != self._process:  # the parent goes on with it
            return
        with self._lock:
            self._is_closed = True
            line, self._line = self._line, None
        if line:
            line.close()
