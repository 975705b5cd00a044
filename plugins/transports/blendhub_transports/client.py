"""The client of the transport ``zmq``.

ZeroMQ's sockets are not safe for threads, so a lock guards the socket. The thread that submits a request sends it
itself; a thread of the connection reads the replies, and notices the end of the server. No caller waits for a server
that does not read: what cannot be queued at once is Busy.
"""

import contextlib
import itertools
import os
import select
import threading

import zmq

from blendhub.contracts.transport import Buffer, Codec, Connection, Envelope
from blendhub.core.errors import BlendHubError, Busy, PeerGone, ProtocolError
from blendhub_transports import frames
from blendhub_transports.pending import PendingRequest
from blendhub_transports.socket_file import why_unreachable

CLOSE_S = 1.0
SERVER_LEFT = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class ZmqConnection(Connection):
    """Reaches the server with the first request, and the next one with the first request after a server left."""

    def __init__(self, path: str, codec: Codec, max_pending: int) -> None:
        self._path = path
        self._codec = codec
        self._max_pending = max_pending
        self._process = os.getpid()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        """Guards the next two; held for moments only, never while a server is waited for."""
        self._line: _Line | None = None
        self._is_closed = False

    def submit(self, request: Envelope, timeout: float) -> PendingRequest:
        pending = PendingRequest(next(self._numbers), f"ipc://{self._path}", timeout)
        message, version = self._codec.encode(request.message), self._codec.version
        parts = frames.encode(version, frames.REQUEST, pending.number, pending.deadline, message, request.payload)
        if os.getpid() != self._process:
            raise PeerGone(f"this connection to {self._path} belongs to the process that this one forked from")
        with self._lock:
            if self._is_closed:
                raise PeerGone(f"this connection to {self._path} was closed")
            if self._line is None or self._line.is_over:
                self._line = _Line(self._path, self._codec)
            line = self._line
        line.send(pending, parts, self._max_pending)
        return pending

    def close(self) -> None:
        if os.getpid() != self._process:  # the parent goes on with it
            return
        with self._lock:
            self._is_closed = True
            line, self._line = self._line, None
        if line:
            line.close()


class _Line:
    """A connected socket, the requests that were sent through it, and its thread; ends with the server.

    ZeroMQ would deliver to a server's successor what it still holds for the server, so a line never connects again.
    """

    def __init__(self, path: str, codec: Codec) -> None:
        self._path = path
        self._codec = codec
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.RECONNECT_IVL, -1), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(SERVER_LEFT)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Ends the thread."""
        self._lock = threading.Lock()
        """Guards the socket and the next two."""
        self._pending: dict[int, PendingRequest] = {}
        self.is_over = False
        self._is_closed = False
        self._error: BlendHubError = PeerGone(f"this connection to {path} was closed before the reply")
        """Why it is over."""
        self._socket.connect(f"ipc://{path}")
        self._thread = threading.Thread(target=self._run, name="blendhub-zmq", daemon=True)
        self._thread.start()

    def send(self, pending: PendingRequest, parts: list[Buffer], max_pending: int) -> None:
        with self._lock:
            if self.is_over:
                raise self._error
            if len(self._pending) >= max_pending:
                raise Busy(
                    f"this connection to {self._path} has {max_pending} requests under way, all that max_pending allows"
                )
            self._pending[pending.number] = pending
            self._socket.send_multipart(parts, zmq.NOBLOCK)
            # Sending may consume the signal of a reply that has arrived.
            self._take_replies()

    def close(self) -> None:
        with self._lock:
            if not self.is_over:
                self._is_closed = True
                os.eventfd_write(self._wakeup, 1)
        self._thread.join(CLOSE_S)

    def _take_replies(self) -> None:
        """Settle the requests that are answered; to be called with the lock."""
        with contextlib.suppress(zmq.Again):
            while True:
                parts = [frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]
                try:
                    header = frames.read_header(parts[0])
                except ProtocolError:  # nothing says whose it is
                    continue
                outcome: Envelope | BlendHubError
                try:
                    outcome = frames.decode(header, parts, self._codec, reader="the client", writer="the server")
                except BlendHubError as error:
                    outcome = error
                if pending := self._pending.pop(header.number, None):
                    pending.settle(outcome)

    def _run(self) -> None:
        """The thread: read replies until the server leaves or the connection is closed."""
        poll = select.poll()
        events = int(self._monitor.getsockopt(zmq.FD))
        for descriptor in (int(self._socket.getsockopt(zmq.FD)), events, self._wakeup):
            poll.register(descriptor, select.POLLIN)
        ready = {events}
        while self._wakeup not in ready:
            with self._lock:
                self._take_replies()
            # The descriptor signals an event once, so it is asked each time.
            if int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                break
            ready = {descriptor for descriptor, _ in poll.poll()}
        if not self._is_closed:
            self._error = why_unreachable(self._path) or PeerGone(
                f"the server at {self._path} died, left, or cut this connection; the request may or may not have been "
                "carried out"
            )
        with self._lock:
            self._take_replies()
            self.is_over = True
            pending, self._pending = self._pending, {}
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            os.close(self._wakeup)
        self._context.term()
        for request in pending.values():
            request.settle(self._error)
