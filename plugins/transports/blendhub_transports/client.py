"""The client of the transport ``zmq``.

ZeroMQ's sockets are not safe for threads, so a lock guards the socket. The thread that submits a request sends it
itself; a thread of the connection reads the replies, and notices the end of the server. No caller waits for a server
that does not read: what cannot be queued at once is Busy.
"""

import contextlib
import os
import select
import threading

import zmq

from blendhub.contracts.transport import Buffer, Codec
from blendhub.core.errors import PeerGone
from blendhub_transports.lines import Line, LineConnection
from blendhub_transports.socket_file import why_unreachable

CLOSE_S = 1.0
SERVER_LEFT = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class ZmqConnection(LineConnection):
    def __init__(self, path: str, codec: Codec, max_pending: int) -> None:
        super().__init__(f"ipc://{path}", codec, max_pending)
        self._path = path

    def _connect(self) -> Line:
        return _Line(self._path, self._codec)


class _Line(Line):
    """A connected socket and its thread. ZeroMQ would deliver to a server's successor what it still holds for the
    server, so the socket never connects again.
    """

    def __init__(self, path: str, codec: Codec) -> None:
        super().__init__(f"ipc://{path}", codec)
        self._path = path
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.RECONNECT_IVL, -1), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(SERVER_LEFT)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Ends the thread."""
        self._is_closed = False
        self._socket.connect(f"ipc://{path}")
        self._thread = threading.Thread(target=self._run, name="blendhub-zmq", daemon=True)
        self._thread.start()

    def _send(self, parts: list[Buffer]) -> None:
        # The socket takes nothing once the server has left. The thread, which hears of that now, ends the request then.
        with contextlib.suppress(zmq.Again):
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
                self._settle([frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)])

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
        why = None
        if not self._is_closed:
            why = why_unreachable(self._path, self._endpoint) or PeerGone(
                f"the server at {self._path} died, left, or cut this connection; the request may or may not have been "
                "carried out"
            )
        with self._lock:
            self._take_replies()
            self._end(why)
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            os.close(self._wakeup)
        self._context.term()
