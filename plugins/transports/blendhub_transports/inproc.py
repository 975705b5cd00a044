"""The transport ``inproc``: requests within one process, passed by reference.

Messages and payloads are not copied or encoded, so the sender must not change them afterwards. The service
runs on the loop that called ``serve``; callers are other threads, or that loop through ``submit``.
"""

import asyncio
import itertools
import threading
from functools import partial
from typing import ClassVar

from blendhub.contracts.transport import Codec, Connection, Envelope, Peer, Server, Service, Transport
from blendhub.core.errors import Busy, InvalidInput, PeerGone, VersionMismatch
from blendhub_transports.dispatcher import Dispatcher, Outcome
from blendhub_transports.options import TransportOptions
from blendhub_transports.pending import PendingRequest

SCHEME = "inproc://"


class InprocTransport(Transport):
    schemes = (SCHEME,)

    def __init__(self, options: TransportOptions) -> None:
        self._max_pending = options.max_pending

    async def serve(self, endpoint: str, service: Service) -> Server:
        return InprocServer(_checked(endpoint), service, self._max_pending)

    def connect(self, endpoint: str, codec: Codec) -> Connection:
        return InprocConnection(_checked(endpoint), codec, self._max_pending)


class InprocServer(Server):
    by_endpoint: ClassVar[dict[str, "InprocServer"]] = {}
    _opening = threading.Lock()

    def __init__(self, endpoint: str, service: Service, max_pending: int) -> None:
        self.endpoint = endpoint
        self.refused = 0
        self.service = service
        self.connections: set[InprocConnection] = set()
        """Those that have sent a request."""
        self.loop = asyncio.get_running_loop()
        self.dispatcher = Dispatcher(service, max_pending, endpoint)
        with self._opening:
            if endpoint in self.by_endpoint:
                raise InvalidInput(f"a server already listens at {endpoint}; stop it or choose another name")
            self.by_endpoint[endpoint] = self

    async def close(self) -> None:
        if self.by_endpoint.get(self.endpoint) is self:
            del self.by_endpoint[self.endpoint]
            await self.dispatcher.close()
            for connection in list(self.connections):
                connection.end_all(f"{self.endpoint} closed before it replied")


class InprocConnection(Connection):
    _numbers = itertools.count(1)

    def __init__(self, endpoint: str, codec: Codec, max_pending: int) -> None:
        self._endpoint = endpoint
        self._codec = codec
        self._max_pending = max_pending
        self._peer: Peer = b"inproc-%d" % next(self._numbers)
        self._pending: dict[int, PendingRequest] = {}
        self._server: InprocServer | None = None
        self._is_closed = False

    def submit(self, request: Envelope, timeout: float) -> PendingRequest:
        pending = PendingRequest(next(self._numbers), self._endpoint, timeout)
        if self._is_closed:
            raise PeerGone(f"this connection to {self._endpoint} was closed")
        if len(self._pending) >= self._max_pending:
            raise Busy(f"this connection to {self._endpoint} has {self._max_pending} requests under way")
        server = self._server = InprocServer.by_endpoint.get(self._endpoint)
        if server is None:
            raise PeerGone(f"no server listens at {self._endpoint} in this process")
        if server.service.codec.version != self._codec.version:
            raise VersionMismatch(
                f"the client speaks version {self._codec.version}, the server {server.service.codec.version}; "
                "install the same BlendHub on both sides"
            )
        self._pending[pending.number] = pending
        server.connections.add(self)
        dispatch = partial(
            server.dispatcher.dispatch, self._peer, request, pending.deadline, partial(self._settle, pending)
        )
        try:
            server.loop.call_soon_threadsafe(dispatch)
        except RuntimeError:  # the loop is closed
            self._settle(pending, PeerGone(f"{self._endpoint} is gone"))
        if InprocServer.by_endpoint.get(self._endpoint) is not server:
            self._settle(pending, PeerGone(f"{self._endpoint} closed before it replied"))
        return pending

    def close(self) -> None:
        server, self._server, self._is_closed = self._server, None, True
        self.end_all(f"this connection to {self._endpoint} was closed")
        if server:
            server.connections.discard(self)
            if not server.loop.is_closed():
                server.loop.call_soon_threadsafe(server.dispatcher.peer_gone, self._peer)

    def end_all(self, why: str) -> None:
        """Have all requests under way end with PeerGone."""
        for pending in list(self._pending.values()):
            self._settle(pending, PeerGone(why))

    def _settle(self, pending: PendingRequest, outcome: Outcome) -> None:
        self._pending.pop(pending.number, None)
        pending.settle(outcome)


def _checked(endpoint: str) -> str:
    if not endpoint.startswith(SCHEME) or endpoint == SCHEME:
        raise InvalidInput(f"endpoint {endpoint!r} is not understood; expected inproc://NAME")
    return endpoint
