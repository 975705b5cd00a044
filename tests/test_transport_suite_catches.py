"""Transports with one fault each, and the test of the suite that must see it."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import zmq
from blendhub_transports.client import ZmqConnection
from blendhub_transports.options import TransportOptions
from blendhub_transports.zmq_transport import ZmqTransport

from blendhub.contracts import Codec, Connection, Envelope, Pending, Server, Service, Transport
from blendhub.contracts.transport import Peer
from blendhub.testing import TransportSuite
from tests.suite_runs import proofs

pytestmark = pytest.mark.slow
SOON_S = 1.0
"""What the suite takes for at once in these tests."""
LATE_S = 1.5 * SOON_S


class Faulty(ZmqTransport):
    """A transport whose fault is a function, by what the function takes the place of."""

    def __init__(self, max_pending: int = 600, **faults: Any) -> None:
        super().__init__(TransportOptions(max_pending=max_pending))
        self.faults = faults

    def connect(self, endpoint: str, codec: Codec) -> Connection:
        inner = super().connect(endpoint, codec)
        assert isinstance(inner, ZmqConnection)
        return Wrapped(inner, self.faults)

    async def serve(self, endpoint: str, service: Service) -> Server:
        server = await super().serve(endpoint, Through(service, self.faults.get("handle")))
        self.faults.get("server", str)(server)
        return server


class Wrapped(Connection):
    def __init__(self, inner: ZmqConnection, faults: dict[str, Callable[..., Any]]) -> None:
        self.inner, self.faults = inner, faults
        self.last: Any = None

    def submit(self, request: Envelope, timeout: float) -> Pending:
        pending: Pending = self.faults.get("submit", sound)(self, request, timeout)
        return pending

    def close(self) -> None:
        self.inner.close()
        self.faults.get("closed", str)(self)

    @property
    def has_lost_its_server(self) -> bool:
        return self.inner._line is not None and self.inner._line.is_over

    def another(self) -> ZmqConnection:
        """A new connection to the same server."""
        return ZmqConnection(self.inner._path, self.inner._codec, 600)


class Through(Service):
    def __init__(self, inner: Any, handle: Callable[..., Any] | None) -> None:
        self.inner, self.codec, self.gone, self.faulty_handle = inner, inner.codec, inner.gone, handle
        self.is_dead = False

    def handle(self, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
        handled: Envelope = (
            self.faulty_handle(self, peer, request) if self.faulty_handle else self.inner.handle(peer, request)
        )
        return handled


def sound(connection: Wrapped, request: Envelope, timeout: float) -> Pending:
    return connection.inner.submit(request, timeout)


def faulty(**faults: Any) -> Callable[..., Transport]:
    """What makes a transport with a fault, which a function makes in this place of it."""
    return lambda suite: Faulty(**faults)


def answers_with_the_last_reply(connection: Wrapped, request: Envelope, timeout: float) -> Pending:
    before, connection.last = connection.last, sound(connection, request, timeout)
    return before or connection.last


def sends_again(connection: Wrapped, request: Envelope, timeout: float) -> Pending:
    """A request that was under way when the server left is sent to the next one, too."""
    if connection.has_lost_its_server:
        sound(connection, connection.last, timeout)
    connection.last = request
    return sound(connection, request, timeout)


def serves_forks(connection: Wrapped, request: Envelope, timeout: float) -> Pending:
    is_parent = os.getpid() == connection.inner._process
    return (connection.inner if is_parent else connection.another()).submit(request, timeout)


def dies_of_garbage(server: Any) -> None:
    server.refuse = lambda reason: asyncio.ensure_future(server.close())


class WaitsForReaders(Faulty):
    """A reply waits, and with it the loop of all clients, until its reader has room for it."""

    async def serve(self, endpoint: str, service: Service) -> Server:
        with patch("blendhub_transports.server.MAX_UNREAD", 1):
            server: Any = await super().serve(endpoint, service)
        send = server._router.send_multipart
        server._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        server._router.send_multipart = lambda parts, flags: send(parts)
        return server


FAULTS: dict[str, list[Callable[..., Transport]]] = {
    "test_replies_come_in_any_order": [faulty(submit=answers_with_the_last_reply)],
    "test_a_request_ends_at_its_deadline_even_if_no_thread_waits": [
        faulty(submit=lambda connection, request, timeout: sound(connection, request, timeout + LATE_S)),
    ],
    "test_one_request_too_many_is_answered_busy_at_once_and_later_there_is_room": [
        lambda suite: Faulty(max_pending=10**6),
    ],
    "test_a_new_server_at_the_same_endpoint_is_found": [faulty(submit=sends_again)],
    "test_a_fork_does_not_use_the_connection_of_its_parent": [faulty(submit=serves_forks)],
    "test_no_other_user_can_connect": [
        faulty(server=lambda server: Path(server.endpoint.removeprefix("ipc://")).chmod(0o666)),
        faulty(server=lambda server: setattr(server, "for_anyone", socket.create_server(("127.0.0.1", 0)))),
    ],
    "test_a_client_that_stands_still_blocks_no_other": [WaitsForReaders],
    "test_garbage_does_no_harm_and_is_counted": [faulty(server=dies_of_garbage)],
}


class Suite(TransportSuite):
    """That it passes without a fault, plugins/transports tests."""

    max_pending = 600
    soon_s = SOON_S

    def send_raw(self, endpoint: str, data: bytes) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 50)
            stranger.connect(endpoint)
            stranger.send(data)


globals().update(proofs(Suite, FAULTS))
