"""The transport ``inproc``: requests within one process, passed by reference.

Messages and payloads are not copied or encoded, so the sender must not change them afterwards. The service
runs on the loop that called ``serve``; callers are other threads, or that loop through ``submit``.
"""

import asyncio
import itertools
import threading
import time
from typing import ClassVar

from blendhub.contracts.transport import Codec, Connection, Envelope, Peer, Pending, Server, Service, Transport
from blendhub.core.errors import BlendHubError, Busy, DeadlineExceeded, InvalidInput, PeerGone, VersionMismatch
from blendhub_transports.deadline import deadline_after
from blendhub_transports.dispatcher import Dispatcher
from blendhub_transports.options import InprocOptions

SCHEME = "inproc://"


class InprocTransport(Transport):
    schemes = (SCHEME,)

    def __init__(self, options: InprocOptions) -> None:
        self._options = options

    async def serve(self, endpoint: str, service: Service) -> Server:
        return InprocServer(_checked(endpoint), service, self._options)

    def connect(self, endpoint: str, codec: Codec) -> Connection:
        return InprocConnection(_checked(endpoint), codec, self._options)


class InprocServer(Server):
    by_endpoint: ClassVar[dict[str, "InprocServer"]] = {}
    _opening = threading.Lock()

    def __init__(self, endpoint: str, service: Service, options: InprocOptions) -> None:
        self.endpoint = endpoint
        self.refused = 0
        self.service = service
        self.loop = asyncio.get_running_loop()
        self._dispatcher = Dispatcher(service, options.max_pending, endpoint)
        self._waiting: set[InprocPending] = set()
        self._closed = False
        with self._opening:
            if endpoint in self.by_endpoint:
                raise InvalidInput(f"a server already listens at {endpoint}; stop it or choose another name")
            self.by_endpoint[endpoint] = self

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            del self.by_endpoint[self.endpoint]
            await self._dispatcher.close()
            # Requests that were posted but not yet dispatched.
            for pending in list(self._waiting):
                pending.settle(PeerGone(f"{self.endpoint} closed before it replied"))

    def post(self, peer: Peer, request: Envelope, pending: "InprocPending") -> None:
        """From any thread."""
        self._waiting.add(pending)
        try:
            self.loop.call_soon_threadsafe(self._dispatch, peer, request, pending)
        except RuntimeError:  # the loop is closed
            pending.settle(PeerGone(f"{self.endpoint} is gone"))
        if self._closed:
            pending.settle(PeerGone(f"{self.endpoint} closed before it replied"))

    def gone(self, peer: Peer) -> None:
        if not self._closed and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._dispatcher.peer_gone, peer)

    def forget(self, pending: "InprocPending") -> None:
        self._waiting.discard(pending)

    def _dispatch(self, peer: Peer, request: Envelope, pending: "InprocPending") -> None:
        if not pending.done() and not self._closed:
            self._dispatcher.dispatch(peer, request, pending.deadline - time.monotonic(), pending.settle)


class InprocPending(Pending):
    def __init__(self, connection: "InprocConnection", timeout: float) -> None:
        self.deadline = deadline_after(timeout)
        self._timeout = timeout
        self._connection = connection
        self._outcome: Envelope | BlendHubError | None = None
        self._settled = threading.Event()

    def settle(self, outcome: Envelope | BlendHubError) -> None:
        """The first outcome counts."""
        if self._outcome is None:
            self._outcome = outcome
            self._settled.set()
            self._connection.forget(self)

    def done(self) -> bool:
        if self._outcome is None and time.monotonic() >= self.deadline:
            self.settle(self._late())
        return self._outcome is not None

    def result(self) -> Envelope:
        if self._outcome is None and not self._settled.wait(max(0.0, self.deadline - time.monotonic())):
            self.settle(self._late())
        if isinstance(self._outcome, Envelope):
            return self._outcome
        assert self._outcome
        raise self._outcome

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self._connection.endpoint} did not answer within {self._timeout:g} s")


class InprocConnection(Connection):
    _numbers = itertools.count(1)

    def __init__(self, endpoint: str, codec: Codec, options: InprocOptions) -> None:
        self.endpoint = endpoint
        self._codec = codec
        self._options = options
        self._peer: Peer = b"inproc-%d" % next(self._numbers)
        self._under_way: set[InprocPending] = set()
        self._server: InprocServer | None = None
        self._closed = False

    def submit(self, request: Envelope, timeout: float) -> InprocPending:
        pending = InprocPending(self, timeout)
        if self._closed:
            raise PeerGone(f"this connection to {self.endpoint} was closed")
        if len(self._under_way) >= self._options.max_pending:
            raise Busy(f"this connection to {self.endpoint} has {self._options.max_pending} requests under way")
        server = InprocServer.by_endpoint.get(self.endpoint)
        if server is None:
            raise PeerGone(f"no server listens at {self.endpoint} in this process")
        if server.service.codec.version != self._codec.version:
            raise VersionMismatch(
                f"the client speaks version {self._codec.version}, the server {server.service.codec.version}; "
                "install the same BlendHub on both sides"
            )
        self._server = server
        self._under_way.add(pending)
        server.post(self._peer, request, pending)
        return pending

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for pending in list(self._under_way):
            pending.settle(PeerGone(f"this connection to {self.endpoint} was closed"))
        if self._server:
            self._server.gone(self._peer)

    def forget(self, pending: InprocPending) -> None:
        self._under_way.discard(pending)
        if self._server:
            self._server.forget(pending)


def _checked(endpoint: str) -> str:
    if not endpoint.startswith(SCHEME) or endpoint == SCHEME:
        raise InvalidInput(f"endpoint {endpoint!r} is not understood; expected inproc://NAME")
    return endpoint
