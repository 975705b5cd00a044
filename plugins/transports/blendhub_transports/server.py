"""The server of the transport ``unix``, on the caller's event loop."""

import asyncio
import itertools
import logging
import secrets
import time
from functools import partial

from blendhub.contracts.transport import Envelope, Peer, Server, Service
from blendhub.core.errors import BlendHubError, ProtocolError, VersionMismatch
from blendhub_transports import frames
from blendhub_transports.dispatcher import Dispatcher, Outcome, service_failure
from blendhub_transports.socket_file import SocketFile

log = logging.getLogger("blendhub.transports")

MOST_UNREAD = 2**26
"""Bytes of replies that wait for a client that does not read them. It loses those beyond."""

LINGER_S = 0.2
"""How long a closing server waits until its last replies are read."""


async def serve(endpoint: str, path: str, service: Service, max_pending: int) -> "UnixServer":
    """Listen at a socket file, which is private before the first connection is possible."""
    server = UnixServer(endpoint, service, max_pending, SocketFile(path))
    await server.listen()
    return server


class UnixServer(Server):
    def __init__(self, endpoint: str, service: Service, max_pending: int, file: SocketFile) -> None:
        self.endpoint = endpoint
        self.refused = 0
        self.codec = service.codec
        self.dispatcher = Dispatcher(service, max_pending, endpoint)
        self.connections: set[_ServedConnection] = set()
        self._file = file
        # A service may have several servers: no two of them name a peer alike.
        self._name = secrets.token_bytes(8)
        self._numbers = itertools.count(1)

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_unix_server(self._new_connection, sock=self._file.socket)

    def _new_connection(self) -> "_ServedConnection":
        return _ServedConnection(self, self._name + next(self._numbers).to_bytes(8, "big"))

    async def close(self) -> None:
        self._listener.close()
        self._file.remove()
        for connection in self.connections:
            connection.transport.pause_reading()
        await self.dispatcher.close()
        for connection in self.connections:
            connection.transport.close()  # when what was written is sent
        until = time.monotonic() + LINGER_S
        while self.connections and time.monotonic() < until:
            await asyncio.sleep(0.001)
        for connection in self.connections:
            connection.transport.abort()

    def refuse(self, reason: object) -> None:
        self.refused += 1
        log.debug("%s: refused: %s", self.endpoint, reason)


class _ServedConnection(asyncio.Protocol):
    """One client's connection: cuts what arrives into requests, and sends the replies."""

    transport: asyncio.Transport

    def __init__(self, server: UnixServer, peer: Peer) -> None:
        self._server = server
        self._peer = peer
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._received:
            self._server.refuse("the beginning of a request")
        self._server.dispatcher.peer_gone(self._peer)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= frames.HEADER_BYTES and self._take_request():
            pass

    def _take_request(self) -> bool:
        """Have the next request handled; returns whether all of it was there."""
        server, header = self._server, None
        try:
            header = frames.read_header(self._received)
            frames.check(header, server.codec.version, reader="the server", writer="the client")
        except (ProtocolError, VersionMismatch) as error:
            # Where the next request begins is not known.
            self._received.clear()
            self._refuse(error, header)
            self.transport.close()
            return False
        end = frames.HEADER_BYTES + header.size
        if len(self._received) < end:
            return False
        if len(self._received) == end:
            frame, self._received = self._received, bytearray()
        else:
            frame = self._received[:end]
            del self._received[:end]
        try:
            request = frames.decode(header, memoryview(frame)[frames.HEADER_BYTES :], server.codec)
            if header.kind != frames.REQUEST:
                raise ProtocolError(f"a frame of kind {header.kind} is not a request")
        except BlendHubError as error:
            self._refuse(error, header)
            return True
        server.dispatcher.dispatch(self._peer, request, header.deadline, partial(self._reply, header.number))
        return True

    def _refuse(self, error: BlendHubError, header: frames.Header | None) -> None:
        """Count a frame, and answer it if it says which request it is."""
        self._server.refuse(error)
        if header:
            self._reply(header.number, error)

    def _reply(self, number: int, outcome: Outcome) -> None:
        if self.transport.is_closing() or self.transport.get_write_buffer_size() > MOST_UNREAD:
            return
        version = self._server.codec.version
        if isinstance(outcome, Envelope):
            try:
                parts = (self._server.codec.encode(outcome.message), *outcome.payload)
                return self.transport.writelines(frames.encode(version, frames.REPLY, number, 0.0, parts))
            except Exception as error:
                log.exception("%s: a reply of %s cannot be sent", self._server.endpoint, type(outcome.message).__name__)
                outcome = service_failure(error)
        return self.transport.writelines(
            frames.encode(version, frames.ERROR, number, 0.0, [frames.encode_error(outcome)])
        )
