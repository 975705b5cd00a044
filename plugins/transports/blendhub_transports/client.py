"""The client of the transport ``unix``.

The thread that submits a request writes it to the socket itself, as far as the socket takes it at once. A thread of the
connection writes the rest and reads the replies. So no caller waits for a server that does not read.
"""

import itertools
import os
import select
import socket
import threading
from collections import deque

from blendhub.contracts.transport import Buffer, Codec, Connection, Envelope
from blendhub.core.errors import BlendHubError, Busy, PeerGone
from blendhub_transports import frames
from blendhub_transports.pending import PendingRequest
from blendhub_transports.socket_file import connect_to

CLOSE_S = 1.0


class UnixConnection(Connection):
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
        parts = (self._codec.encode(request.message), *request.payload)
        frame = frames.encode(self._codec.version, frames.REQUEST, pending.number, pending.deadline, parts)
        if os.getpid() != self._process:
            raise PeerGone(f"this connection to {self._path} belongs to the process that this one forked from")
        with self._lock:
            if self._is_closed:
                raise PeerGone(f"this connection to {self._path} was closed")
            if self._line is None or self._line.is_over:
                self._line = _Line(self._path, self._codec)
            line = self._line
        line.send(pending, frame, self._max_pending)
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
    """A connected socket, the requests that were sent through it, and its thread; ends with the server."""

    def __init__(self, path: str, codec: Codec) -> None:
        """Raises PeerGone if no server listens there."""
        self._path = path
        self._codec = codec
        self._socket = connect_to(path)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Wakes the thread when something is left to be written."""
        self._lock = threading.Lock()
        """Guards the next three."""
        self._pending: dict[int, PendingRequest] = {}
        self._unsent: deque[memoryview] = deque()
        self.is_over = False
        self._why_over = f"the server at {path} died, left, or cut this connection"
        self._thread = threading.Thread(target=self._run, name="blendhub-unix", daemon=True)
        self._thread.start()

    def send(self, pending: PendingRequest, frame: list[Buffer], max_pending: int) -> None:
        with self._lock:
            if self.is_over:
                raise PeerGone(self._why_over)
            if len(self._pending) >= max_pending:
                raise Busy(
                    f"this connection to {self._path} has {max_pending} requests under way, all that max_pending allows"
                )
            self._pending[pending.number] = pending
            self._unsent.extend(map(memoryview, frame))
            self._write()
            if self._unsent:
                # The caller may change its buffers from now on.
                self._unsent = deque(memoryview(bytes(part)) for part in self._unsent)
                os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        with self._lock:
            if not self.is_over:
                self._why_over = f"this connection to {self._path} was closed"
                self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread
        self._thread.join(CLOSE_S)

    def _write(self) -> None:
        """Write what the socket takes at once; to be called with the lock."""
        while self._unsent:
            part = self._unsent[0].cast("B")
            try:
                n_sent = self._socket.send(part, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # the thread notices the end, too
                return self._unsent.clear()
            if n_sent < len(part):
                self._unsent[0] = part[n_sent:]
            else:
                self._unsent.popleft()

    # In the thread.

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        try:
            while True:
                poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
                ready = dict(poll.poll())
                if self._wakeup in ready:
                    os.eventfd_read(self._wakeup)
                if self._unsent:
                    with self._lock:
                        self._write()
                if ready.get(self._socket.fileno(), 0) & ~select.POLLOUT:
                    self._read_reply()
        except EOFError:
            pass
        except (OSError, BlendHubError) as error:
            self._why_over = f"the connection to {self._path} broke: {error}"
        with self._lock:
            self.is_over = True
            pending, self._pending = self._pending, {}
            self._socket.close()
            os.close(self._wakeup)
        for request in pending.values():
            request.settle(PeerGone(f"{self._why_over}; the request may or may not have been carried out"))

    def _read_reply(self) -> None:
        header = frames.read_header(self._read(frames.HEADER_BYTES))
        with self._lock:
            pending = self._pending.pop(header.number, None)
        outcome: Envelope | BlendHubError
        try:
            frames.check(header, self._codec.version, reader="the client", writer="the server")
            outcome = frames.decode(header, self._read(header.size), self._codec)
        except BlendHubError as error:
            outcome = error
        if pending:
            pending.settle(outcome)

    def _read(self, size: int) -> memoryview:
        data = bytearray(size)
        if self._socket.recv_into(data, size, socket.MSG_WAITALL) < size:
            raise EOFError
        return memoryview(data)
