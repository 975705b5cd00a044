"""The server of the transport ``zmq``: a ROUTER socket, read on the caller's event loop."""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from functools import partial

import zmq

from blendhub.contracts.transport import Buffer, Envelope, Server, Service
from blendhub.core.errors import BlendHubError, ProtocolError
from blendhub_transports import frames
from blendhub_transports.dispatcher import Dispatcher, Outcome, service_failure
from blendhub_transports.socket_file import SocketFile

log = logging.getLogger("blendhub.transports")

LINGER_MS = 200
"""How long a closing server waits until its last replies are read."""
MOST_UNREAD = 1000
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
        for option, value in (
            (zmq.LINGER, LINGER_MS), (zmq.SNDHWM, MOST_UNREAD), (zmq.RCVHWM, MOST_UNREAD),
            (zmq.MAXMSGSIZE, frames.MOST_BYTES + frames.HEADER_BYTES), (zmq.USE_FD, self._file.socket.detach()),
        ):  # fmt: skip
            self._router.setsockopt(option, value)
        self._router.bind(endpoint)
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self._router.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._read_requests)
        self._is_closed = False

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
        for _ in range(BATCH):
            if self._is_closed:
                return
            try:
                routing_id, *parts = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._take_request(routing_id.bytes, [part.buffer for part in parts])
        self._loop.call_soon(self._read_requests)

    def _take_request(self, routing_id: bytes, parts: list[memoryview]) -> None:
        header = None
        try:
            header = frames.read_header(parts[0] if parts else memoryview(b""))
            request = frames.decode(header, parts, self._codec, reader="the server", writer="the client")
            if header.kind != frames.REQUEST:
                raise ProtocolError(f"a frame of kind {header.kind} is not a request")
        except BlendHubError as error:
            self.refuse(error)
            if header:
                self._send(routing_id, header.number, frames.ERROR, frames.encode_error(error))
            return
        reply = partial(self._reply, routing_id, header.number)
        self.dispatcher.dispatch(self._name + routing_id, request, header.deadline, reply)

    def _reply(self, routing_id: bytes, number: int, outcome: Outcome) -> None:
        if isinstance(outcome, Envelope):
            try:
                message = self._codec.encode(outcome.message)
                return self._send(routing_id, number, frames.REPLY, message, outcome.payload)
            except Exception as error:
                log.exception("%s: a reply of %s cannot be sent", self.endpoint, type(outcome.message).__name__)
                outcome = service_failure(error)
        return self._send(routing_id, number, frames.ERROR, frames.encode_error(outcome))

    def _send(self, routing_id: bytes, number: int, kind: int, message: bytes, payload: Sequence[Buffer] = ()) -> None:
        # ZeroMQ drops what a client that left, or does not read, would get.
        parts = frames.encode(self._codec.version, kind, number, 0.0, message, payload)
        self._router.send_multipart([routing_id, *parts], zmq.NOBLOCK)
        if int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._read_requests)
