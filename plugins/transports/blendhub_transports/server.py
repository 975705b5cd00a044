"""The server of the transport ``zmq``: a ROUTER socket, read on the caller's event loop."""

import asyncio
import logging
import secrets
from functools import partial

import zmq

from blendhub.contracts.transport import Envelope, Server, Service
from blendhub.core.errors import BlendHubError, ProtocolError
from blendhub_transports import frames
from blendhub_transports.dispatcher import Dispatcher, Outcome, service_failure
from blendhub_transports.socket_file import SocketFile

log = logging.getLogger("blendhub.transports")

LINGER_MS = 200
"""How long a closing server waits until its last replies are read."""
MAX_UNREAD = 1000
"""Replies that wait for a client that does not read them. It loses those beyond."""
BATCH = 64
"""Requests that are read in one turn before other callbacks of the loop run."""


class ZmqServer(Server):
    """ZeroMQ tells no server which of its clients left: the service hears of the end of a process from elsewhere."""

    def __init__(self, endpoint: str, path: str, service: Service, max_pending: int) -> None:
        """The socket file is private before the first connection is possible."""
        self.endpoint = endpoint
        self.refused = 0
        self._codec = service.codec
        self.dispatcher = Dispatcher(service, max_pending, endpoint)
        # A service may have several servers: no two of them name a peer alike.
        self._name = secrets.token_bytes(8)
        self._file = SocketFile(path)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        try:
            for option, value in (
                (zmq.LINGER, LINGER_MS), (zmq.SNDHWM, MAX_UNREAD), (zmq.RCVHWM, MAX_UNREAD),
                (zmq.MAXMSGSIZE, frames.MAX_BYTES + frames.HEADER_BYTES), (zmq.USE_FD, self._file.socket.fileno()),
            ):  # fmt: skip
                self._router.setsockopt(option, value)
            self._router.bind(endpoint)
        except BaseException:
            self._context.destroy(0)
            self._file.socket.close()
            self._file.remove()
            raise
        self._file.socket.detach()  # ZeroMQ closes it
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self._router.getsockopt(zmq.FD))
        self._is_closed = False
        self._reads_soon = False
        """Whether the loop is to read what waits."""
        self._loop.add_reader(self._descriptor, self._read_soon)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._descriptor)
        self._file.remove()
        await self.dispatcher.close()
        self._router.close()
        await asyncio.to_thread(self._context.term)  # when the last replies are sent

    def refuse(self, reason: object) -> None:
        self.refused += 1
        log.debug("%s: refused: %s", self.endpoint, reason)

    def _read_requests(self) -> None:
        """Read what waits. ZeroMQ's descriptor signals a change once, and sending may consume that signal."""
        self._reads_soon = False
        for _ in range(BATCH):
            if self._is_closed:
                return
            try:
                routing_id, *received = (frame.buffer for frame in self._router.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                return
            reply, header = partial(self._reply, bytes(routing_id)), None
            try:
                header = frames.read_header(received[0] if received else memoryview(b""))
                request = frames.decode(header, received, self._codec, reader="the server", writer="the client")
                if header.kind != frames.REQUEST:
                    raise ProtocolError(f"a frame of kind {header.kind} is not a request")
            except BlendHubError as error:
                self.refuse(error)
                if header:
                    reply(header.number, error)
            else:
                peer = self._name + routing_id
                self.dispatcher.dispatch(peer, request, header.deadline, partial(reply, header.number))
        self._read_soon()

    def _read_soon(self) -> None:
        """Have the loop read one batch in its next turn, however many replies are sent in this one."""
        if not self._reads_soon:
            self._reads_soon = True
            self._loop.call_soon(self._read_requests)

    def _reply(self, routing_id: bytes, number: int, outcome: Outcome) -> None:
        version = self._codec.version
        if isinstance(outcome, Envelope):
            try:
                message = self._codec.encode(outcome.message)
                parts = frames.encode(version, frames.REPLY, number, 0.0, message, outcome.payload)
            except Exception as error:
                log.exception("%s: a reply of %s cannot be sent", self.endpoint, type(outcome.message).__name__)
                outcome = service_failure(error)
        if not isinstance(outcome, Envelope):
            parts = frames.encode(version, frames.ERROR, number, 0.0, frames.encode_error(outcome))
        # ZeroMQ drops what a client that left, or does not read, would get.
        self._router.send_multipart([routing_id, *parts], zmq.NOBLOCK)
        if int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._read_soon()
