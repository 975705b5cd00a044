"""Transports with one fault each, and the test of the suite that must see it."""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from blendhub_transports.client import ZmqConnection
from blendhub_transports.options import TransportOptions
from blendhub_transports.server import ZmqServer
from blendhub_transports.zmq_transport import ZmqTransport

from blendhub.contracts import Codec, Connection, Envelope, Pending, Server, Service, Transport
from blendhub.contracts.transport import Peer
from blendhub.core.errors import BlendHubError, DeadlineExceeded, PeerGone, ProtocolError, ServiceFailed
from blendhub.testing import TransportSuite
from blendhub.testing.transports import suite
from tests.suite_runs import all_tests, proofs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_shrinking")]
SOON = 1.0
"""What the suite takes for at once in these tests."""
LATE = 1.5 * SOON
FAULTS: list[tuple[Any, str]] = []
"""Functions that make a transport with a fault, and the tests that see it."""


class Faulty(ZmqTransport):
    """A transport whose fault is a function, by what the function takes the place of."""

    def __init__(self, **faults: Callable[..., Any]) -> None:
        super().__init__(TransportOptions(max_pending=600))
        self.faults = faults

    def connect(self, endpoint: str, codec: Codec) -> Connection:
        endpoint = self.faults.get("endpoint", str)(endpoint)
        inner = super().connect(endpoint, codec)
        assert isinstance(inner, ZmqConnection)
        return Wrapped(inner, self.faults)

    async def serve(self, endpoint: str, service: Service) -> Server:
        self.faults.get("before", str)(endpoint)
        server = await super().serve(endpoint, Through(service, self.faults.get("handle", Service.handle)))
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
    def __init__(self, inner: Service, handle: Callable[..., Envelope | Awaitable[Envelope]]) -> None:
        self.inner, self.codec, self.faulty_handle = inner, inner.codec, handle
        self.is_dead = False

    def handle(self, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
        if self.faulty_handle is Service.handle:
            return self.inner.handle(peer, request)
        return self.faulty_handle(self, peer, request)

    def gone(self, peer: Peer) -> None:
        self.inner.gone(peer)


class Request(Pending):
    """A request under way whose faults are in subclasses."""

    def __init__(self, inner: Pending, timeout: float) -> None:
        self.inner, self.deadline, self.thread = inner, time.monotonic() + timeout, threading.get_ident()

    def done(self, within: float = 0.0) -> bool:
        return self.inner.done(within)

    def result(self) -> Envelope:
        return self.inner.result()


def proves(test: str, place: str, *more: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Names the tests of the suite that see a fault, which a function makes in this place of a transport."""

    def note(fault: Callable[..., Any]) -> Callable[..., Any]:
        def faulty() -> Transport:
            return Faulty(**{place: fault})

        faulty.__name__ = fault.__name__.title().replace("_", "")
        FAULTS.extend((faulty, f"test_{seen_by}") for seen_by in (test, *more))
        return fault

    return note


def sound(connection: Wrapped, request: Envelope, timeout: float) -> Pending:
    return connection.inner.submit(request, timeout)


@proves("a_request_ends_at_its_deadline_even_if_no_thread_waits", "submit")
def answers_late(connection: Wrapped, request: Envelope, timeout: float) -> Pending:
    """Deadlines: the caller waits for the reply, however late it comes."""
    return sound(connection, request, timeout + LATE)


@proves("a_server_that_is_killed_is_reported_and_found_again", "submit", "a_new_server_at_the_same_endpoint_is_found")
def waits_for_a_dead_server(connection: Wrapped, request: Envelope, timeout: float) -> Pending:
    """Deadlines: the end of a server is not reported before the deadline."""

    class Patient(Request):
        def result(self) -> Envelope:
            try:
                return self.inner.result()
            except PeerGone as error:
                time.sleep(max(0.0, min(LATE, self.deadline - time.monotonic())))
                raise DeadlineExceeded(str(error)) from None

    return Patient(sound(connection, request, timeout), timeout)


@proves("replies_come_in_any_order", "submit")
def answers_with_the_last_reply(connection: Wrapped, request: Envelope, timeout: float) -> Pending:
    """Order: a request gets the reply of the one before it."""
    before, connection.last = connection.last, sound(connection, request, timeout)
    return before or connection.last


@proves("a_new_server_at_the_same_endpoint_is_found", "submit")
def gives_up_after_the_server_left(connection: Wrapped, request: Envelope, timeout: float) -> Pending:
    """Reconnecting: a connection that lost its server reaches no other."""
    if connection.has_lost_its_server:
        raise PeerGone("the server left once")
    return sound(connection, request, timeout)


@proves("a_new_server_at_the_same_endpoint_is_found", "submit")
def sends_again(connection: Wrapped, request: Envelope, timeout: float) -> Pending:
    """Reconnecting: a request that was under way when the server left is sent to the next one, too."""
    if connection.has_lost_its_server:
        sound(connection, connection.last, timeout)
    connection.last = request
    return sound(connection, request, timeout)


@proves("threads_share_a_connection", "submit")
def is_for_one_thread(connection: Wrapped, request: Envelope, timeout: float) -> Pending:
    """Threads: a second thread gets no reply while the first one waits."""
    if connection.last:
        raise ProtocolError("another thread is here")
    connection.last = True
    time.sleep(0.001)
    connection.last = False
    return sound(connection, request, timeout)


@proves("a_thread_may_wait_for_what_another_submitted", "submit")
def answers_one_thread(connection: Wrapped, request: Envelope, timeout: float) -> Pending:
    """Threads: only the thread that submitted a request can wait for it."""

    class OfOneThread(Request):
        def result(self) -> Envelope:
            if threading.get_ident() != self.thread:
                raise ProtocolError("another thread submitted this request")
            return self.inner.result()

    return OfOneThread(sound(connection, request, timeout), timeout)


@proves("a_fork_does_not_use_the_connection_of_its_parent", "submit")
def serves_forks(connection: Wrapped, request: Envelope, timeout: float) -> Pending:
    """Threads: a fork goes on with the connection of its parent."""
    is_parent = os.getpid() == connection.inner._process
    return (connection.inner if is_parent else connection.another()).submit(request, timeout)


@proves("replies_come_in_any_order", "submit", "a_pending_request_can_be_asked_again_and_again")
def looks_by_waiting(connection: Wrapped, request: Envelope, timeout: float) -> Pending:
    """``Pending.done``: takes the question for a wait."""

    class Waiting(Request):
        def done(self, within: float = 0.0) -> bool:
            return self.inner.done(1e6)

    return Waiting(sound(connection, request, timeout), timeout)


@proves("payloads_arrive_whole_and_in_order", "submit")
def drops_empty_buffers(connection: Wrapped, request: Envelope, timeout: float) -> Pending:
    """``Envelope``: a buffer of no bytes is a buffer."""
    return sound(connection, Envelope(request.message, [part for part in request.payload if part]), timeout)


@proves("a_connection_that_closes_ends_its_requests", "closed")
def connects_anew_after_it_was_closed(connection: Wrapped) -> None:
    """``Connection.close``: ends requests, but not the connection."""
    connection.inner = connection.another()


@proves("a_client_may_come_before_its_server", "endpoint")
def needs_a_server(endpoint: str) -> str:
    """``Transport.connect``: fails where no server runs yet."""
    if not Path(endpoint.removeprefix("ipc://")).exists():
        raise PeerGone("no server runs yet")
    return endpoint


@proves("an_endpoint_that_is_not_understood_is_refused", "endpoint")
def takes_any_endpoint(endpoint: str) -> str:
    """``schemes``: what is no endpoint is taken for one."""
    return endpoint if "://" in endpoint else f"ipc:///{endpoint}"


@proves("versions_that_differ_are_named", "submit")
def ignores_versions(connection: Wrapped, request: Envelope, timeout: float) -> Pending:
    """Deadlines: versions that differ are not noticed."""
    connection.inner._codec.version = 2
    return sound(connection, request, timeout)


@proves("errors_arrive_and_the_server_lives_on", "handle")
def hides_errors(service: Through, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
    """``Service.handle``: every error is the same to the caller."""
    try:
        return service.inner.handle(peer, request)
    except BlendHubError as error:
        raise ServiceFailed(str(error)) from error


@proves("errors_arrive_and_the_server_lives_on", "handle")
def dies_of_an_error(service: Through, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
    """``Service.handle``: behind an error that is not ours, no request is served any more."""
    if service.is_dead:
        raise ServiceFailed("the service is dead")
    try:
        return service.inner.handle(peer, request)
    except Exception as error:
        service.is_dead = not isinstance(error, BlendHubError)
        raise


@proves("each_connection_is_a_peer_that_leaves_once", "handle")
def knows_no_peers(service: Through, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
    """``Peer``: all connections have one name."""
    return service.inner.handle(b"", request)


@proves("each_connection_is_a_peer_that_leaves_once", "handle")
def reports_peers_that_stay(service: Through, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
    """``Service.gone``: a peer that asks is reported as one that left."""
    service.gone(peer)
    return service.inner.handle(peer, request)


@proves("an_endpoint_has_one_server", "before")
def takes_over_its_endpoint(endpoint: str) -> None:
    """``Transport.serve``: two servers at one endpoint."""
    Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


@proves("a_server_that_closes_twice_leaves_nothing", "server")
def leaves_its_file(server: ZmqServer) -> None:
    """``Server.close``: leaves something behind."""
    Path(f"{server.endpoint.removeprefix('ipc://')}.lock").touch()


BOUND = "one_request_too_many_is_answered_busy_at_once_and_later_there_is_room"


@proves(BOUND, "server")
def shares_one_bound(server: ZmqServer) -> None:
    """Bounds: a connection with many requests leaves no room to the others."""
    dispatch = server.dispatcher.dispatch
    server.dispatcher.dispatch = lambda _, *rest: dispatch(b"everybody", *rest)


def takes_any_number() -> Transport:
    """Bounds: requests wait without a bound, in a server that has no room for them."""
    transport = Faulty()
    transport._max_pending = 10**6
    return transport


FAULTS.append((takes_any_number, f"test_{BOUND}"))


@proves("garbage_does_no_harm_and_is_counted", "server")
def dies_of_garbage(server: ZmqServer) -> None:
    """Hostile input: a frame that is none ends the server."""
    server.refuse = lambda reason: asyncio.ensure_future(server.close())  # type: ignore[assignment]


@proves("garbage_does_no_harm_and_is_counted", "server")
def counts_no_garbage(server: ZmqServer) -> None:
    """Hostile input: what is refused is not counted."""
    server.refuse = lambda reason: None


class Suite(TransportSuite):
    """That it passes without a fault, plugins/transports tests."""

    max_pending = 600
    plugin: Callable[[], Transport]

    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(suite, "SOON", SOON)

    def create(self) -> Transport:
        return type(self).plugin()

    def send_raw(self, endpoint: str, data: bytes) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 50)
            stranger.connect(endpoint)
            stranger.send(data)


globals().update(proofs(Suite, FAULTS))


def test_a_faulty_transport_proves_each_test() -> None:
    assert {test for _, test in FAULTS} == all_tests(TransportSuite)
