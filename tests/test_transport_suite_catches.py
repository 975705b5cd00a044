"""A suite that nothing fails is worth nothing: transports with one fault each, and the test that must see it."""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable
from pathlib import Path

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
from tests.suite_runs import all_tests, passes

pytestmark = pytest.mark.slow
SOON = 1.0
"""What the suite takes for at once in these tests."""
LATE = 1.5 * SOON


class Wrapped(Connection):
    """A connection whose faults are in subclasses."""

    def __init__(self, inner: ZmqConnection) -> None:
        self.inner = inner

    def submit(self, request: Envelope, timeout: float) -> Pending:
        return self.inner.submit(request, timeout)

    def close(self) -> None:
        self.inner.close()

    @property
    def has_lost_its_server(self) -> bool:
        return self.inner._line is not None and self.inner._line.is_over

    def another(self) -> ZmqConnection:
        """A new connection to the same server."""
        return ZmqConnection(self.inner._path, self.inner._codec, 600)


class Sound(ZmqTransport):
    """A transport whose faults are in ``wrap``, or in subclasses."""

    def __init__(self, wrap: type[Wrapped] = Wrapped) -> None:
        super().__init__(TransportOptions(max_pending=600))
        self.wrap = wrap

    def connect(self, endpoint: str, codec: Codec) -> Connection:
        inner = super().connect(endpoint, codec)
        assert isinstance(inner, ZmqConnection)
        return self.wrap(inner)

    async def serve(self, endpoint: str, service: Service) -> Server:
        server = await super().serve(endpoint, Through(self, service))
        assert isinstance(server, ZmqServer)
        self.spoil(server)
        return server

    def spoil(self, server: ZmqServer) -> None:
        """Give the server its fault."""

    def handle(self, service: Service, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
        return service.handle(peer, request)


class Through(Service):
    """The service behind the ``handle`` of a transport."""

    def __init__(self, transport: Sound, inner: Service) -> None:
        self.transport, self.inner, self.codec = transport, inner, inner.codec

    def handle(self, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
        return self.transport.handle(self.inner, peer, request)

    def gone(self, peer: Peer) -> None:
        self.inner.gone(peer)


class Patient(Pending):
    """A request whose faults are in subclasses. It waits for a server that has left."""

    def __init__(self, inner: Pending, timeout: float) -> None:
        self.inner, self.deadline = inner, time.monotonic() + timeout
        self.thread = threading.get_ident()

    def done(self, within: float = 0.0) -> bool:
        return self.inner.done(within)

    def result(self) -> Envelope:
        try:
            return self.inner.result()
        except PeerGone as error:
            time.sleep(max(0.0, min(LATE, self.deadline - time.monotonic())))
            raise DeadlineExceeded(str(error)) from None


class AnswersLate(Wrapped):
    """Deadlines: the caller waits for the reply, however late it comes."""

    def submit(self, request: Envelope, timeout: float) -> Pending:
        return self.inner.submit(request, timeout + LATE)


class WaitsForADeadServer(Wrapped):
    """Deadlines: the end of a server is not reported before the deadline."""

    def submit(self, request: Envelope, timeout: float) -> Pending:
        return Patient(self.inner.submit(request, timeout), timeout)


class AnswersWithTheLastReply(Wrapped):
    """Order: a request gets the reply of the one before it."""

    last: Pending | None = None

    def submit(self, request: Envelope, timeout: float) -> Pending:
        before, self.last = self.last, self.inner.submit(request, timeout)
        return before or self.last


class GivesUpAfterTheServerLeft(Wrapped):
    """Reconnecting: a connection that lost its server reaches no other."""

    def submit(self, request: Envelope, timeout: float) -> Pending:
        if self.has_lost_its_server:
            raise PeerGone("the server left once")
        return self.inner.submit(request, timeout)


class SendsAgain(Wrapped):
    """Reconnecting: a request that was under way when the server left is sent to the next one, too."""

    last: Envelope

    def submit(self, request: Envelope, timeout: float) -> Pending:
        if self.has_lost_its_server:
            self.inner.submit(self.last, timeout)
        self.last = request
        return self.inner.submit(request, timeout)


class ForOneThread(Wrapped):
    """Threads: a second thread gets no reply while the first one waits."""

    lock = threading.Lock()

    def submit(self, request: Envelope, timeout: float) -> Pending:
        if not self.lock.acquire(blocking=False):
            raise ProtocolError("another thread is here")
        try:
            time.sleep(0.001)
            return self.inner.submit(request, timeout)
        finally:
            self.lock.release()


class AnswersOneThread(Wrapped):
    """Threads: only the thread that submitted a request can wait for it."""

    class OfOneThread(Patient):
        def result(self) -> Envelope:
            if threading.get_ident() != self.thread:
                raise ProtocolError("another thread submitted this request")
            return self.inner.result()

    def submit(self, request: Envelope, timeout: float) -> Pending:
        return self.OfOneThread(self.inner.submit(request, timeout), timeout)


class ServesForks(Wrapped):
    """Threads: a fork goes on with the connection of its parent."""

    def submit(self, request: Envelope, timeout: float) -> Pending:
        return (self.inner if os.getpid() == self.inner._process else self.another()).submit(request, timeout)


class LooksByWaiting(Wrapped):
    """``Pending.done``: takes the question for a wait."""

    class Waiting(Patient):
        def done(self, within: float = 0.0) -> bool:
            return self.inner.done(1e6)

    def submit(self, request: Envelope, timeout: float) -> Pending:
        return self.Waiting(self.inner.submit(request, timeout), timeout)


class ConnectsAnewAfterItWasClosed(Wrapped):
    """``Connection.close``: ends requests, but not the connection."""

    def close(self) -> None:
        self.inner.close()
        self.inner = self.another()


class DropsEmptyBuffers(Wrapped):
    """``Envelope``: a buffer of no bytes is a buffer."""

    def submit(self, request: Envelope, timeout: float) -> Pending:
        return self.inner.submit(Envelope(request.message, [part for part in request.payload if part]), timeout)


class NeedsAServer(Sound):
    """``Transport.connect``: fails where no server runs yet."""

    def connect(self, endpoint: str, codec: Codec) -> Connection:
        if not Path(endpoint.removeprefix("ipc://")).exists():
            raise PeerGone("no server runs yet")
        return super().connect(endpoint, codec)


class TakesAnyEndpoint(Sound):
    """``schemes``: what is no endpoint is taken for one."""

    def connect(self, endpoint: str, codec: Codec) -> Connection:
        return super().connect(endpoint if "://" in endpoint else f"ipc:///{endpoint}", codec)


class IgnoresVersions(Sound):
    """Deadlines: versions that differ are not noticed."""

    def connect(self, endpoint: str, codec: Codec) -> Connection:
        codec.version = 1
        return super().connect(endpoint, codec)

    def spoil(self, server: ZmqServer) -> None:
        server._codec.version = 1


class HidesErrors(Sound):
    """``Service.handle``: every error is the same to the caller."""

    def handle(self, service: Service, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
        try:
            return service.handle(peer, request)
        except BlendHubError as error:
            raise ServiceFailed(str(error)) from error


class DiesOfAnError(Sound):
    """``Service.handle``: behind an error that is not ours, no request is served any more."""

    is_dead = False

    def handle(self, service: Service, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
        if self.is_dead:
            raise ServiceFailed("the service is dead")
        try:
            return service.handle(peer, request)
        except Exception as error:
            self.is_dead = not isinstance(error, BlendHubError)
            raise


class KnowsNoPeers(Sound):
    """``Peer``: all connections have one name."""

    def handle(self, service: Service, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
        return service.handle(b"", request)


class ReportsPeersThatStay(Sound):
    """``Service.gone``: a peer that asks is reported as one that left."""

    def handle(self, service: Service, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
        service.gone(peer)
        return service.handle(peer, request)


class TakesOverItsEndpoint(Sound):
    """``Transport.serve``: two servers at one endpoint."""

    async def serve(self, endpoint: str, service: Service) -> Server:
        Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        return await super().serve(endpoint, service)


class LeavesItsFile(Sound):
    """``Server.close``: leaves something behind."""

    def spoil(self, server: ZmqServer) -> None:
        Path(f"{server.endpoint.removeprefix('ipc://')}.lock").touch()


class TakesAnyNumber(Sound):
    """Bounds: requests wait without a bound, in a server that has no room for them."""

    def __init__(self) -> None:
        super().__init__()
        self._max_pending = 10**6


class SharesOneBound(Sound):
    """Bounds: a connection with many requests leaves no room to the others."""

    def spoil(self, server: ZmqServer) -> None:
        dispatch = server.dispatcher.dispatch
        server.dispatcher.dispatch = lambda _, *rest: dispatch(b"everybody", *rest)


class DiesOfGarbage(Sound):
    """Hostile input: a frame that is none ends the server."""

    def spoil(self, server: ZmqServer) -> None:
        server.refuse = lambda reason: asyncio.ensure_future(server.close())  # type: ignore[assignment]


class CountsNoGarbage(Sound):
    """Hostile input: what is refused is not counted."""

    def spoil(self, server: ZmqServer) -> None:
        server.refuse = lambda reason: None


FAULTS = [
    (AnswersLate, "test_a_request_ends_at_its_deadline_even_if_no_thread_waits"),
    (WaitsForADeadServer, "test_a_server_that_is_killed_is_reported_and_found_again"),
    (WaitsForADeadServer, "test_a_new_server_at_the_same_endpoint_is_found"),
    (IgnoresVersions, "test_versions_that_differ_are_named"),
    (AnswersWithTheLastReply, "test_replies_come_in_any_order"),
    (GivesUpAfterTheServerLeft, "test_a_new_server_at_the_same_endpoint_is_found"),
    (SendsAgain, "test_a_new_server_at_the_same_endpoint_is_found"),
    (NeedsAServer, "test_a_client_may_come_before_its_server"),
    (ForOneThread, "test_threads_share_a_connection"),
    (AnswersOneThread, "test_a_thread_may_wait_for_what_another_submitted"),
    (ServesForks, "test_a_fork_does_not_use_the_connection_of_its_parent"),
    (LooksByWaiting, "test_replies_come_in_any_order"),
    (LooksByWaiting, "test_a_pending_request_can_be_asked_again_and_again"),
    (ConnectsAnewAfterItWasClosed, "test_a_connection_that_closes_ends_its_requests"),
    (DropsEmptyBuffers, "test_payloads_arrive_whole_and_in_order"),
    (TakesAnyEndpoint, "test_an_endpoint_that_is_not_understood_is_refused"),
    (HidesErrors, "test_errors_arrive_and_the_server_lives_on"),
    (DiesOfAnError, "test_errors_arrive_and_the_server_lives_on"),
    (KnowsNoPeers, "test_each_connection_is_a_peer_that_leaves_once"),
    (ReportsPeersThatStay, "test_each_connection_is_a_peer_that_leaves_once"),
    (TakesOverItsEndpoint, "test_an_endpoint_has_one_server"),
    (LeavesItsFile, "test_a_server_that_closes_twice_leaves_nothing"),
    (TakesAnyNumber, "test_one_request_too_many_is_answered_busy_at_once_and_later_there_is_room"),
    (SharesOneBound, "test_one_request_too_many_is_answered_busy_at_once_and_later_there_is_room"),
    (DiesOfGarbage, "test_garbage_does_no_harm_and_is_counted"),
    (CountsNoGarbage, "test_garbage_does_no_harm_and_is_counted"),
]


def suite_of(fault: str) -> type[TransportSuite]:
    class Suite(TransportSuite):
        max_pending = 600

        def create(self) -> Transport:
            made = globals()[fault]
            return Sound(made) if issubclass(made, Wrapped) else made()

        def send_raw(self, endpoint: str, data: bytes) -> None:
            with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.setsockopt(zmq.LINGER, 50)
                stranger.connect(endpoint)
                stranger.send(data)

    return Suite


def test_a_faulty_transport_proves_each_test() -> None:
    assert {test for _, test in FAULTS} == all_tests(TransportSuite)


@pytest.mark.parametrize("faulty, test", FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_suite_catches(faulty: type, test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "SOON", SOON)
    assert not passes(__name__, faulty.__name__, test, tmp_path), f"{test} lets {faulty.__name__} pass"


def test_without_a_fault_there_is_nothing_to_catch(tmp_path: Path) -> None:
    """All of these tests: plugins/transports runs the whole suite."""
    assert passes(__name__, "Sound", "test_a_new_server_at_the_same_endpoint_is_found", tmp_path)
