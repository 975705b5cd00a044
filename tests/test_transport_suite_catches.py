"""Transports with one fault each, and the test of the suite that must see it."""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable
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
from tests.suite_runs import all_tests, proofs

pytestmark = pytest.mark.slow


class Wrapped(Connection):
    """A connection whose faults are in subclasses."""

    def __init__(self, inner: Connection) -> None:
        self.inner = inner

    def submit(self, request: Envelope, timeout: float) -> Pending:
        return self.inner.submit(request, timeout)

    def close(self) -> None:
        self.inner.close()


class Sound(ZmqTransport):
    def __init__(self, wrap: type[Wrapped] = Wrapped) -> None:
        super().__init__(TransportOptions(max_pending=600))
        self.wrap = wrap

    def connect(self, endpoint: str, codec: Codec) -> Connection:
        return self.wrap(super().connect(endpoint, codec))


class AnswersLate(Wrapped):
    """Deadlines: the caller waits for the reply, however late it comes."""

    def submit(self, request: Envelope, timeout: float) -> Pending:
        return self.inner.submit(request, timeout + 6.0)


class WaitsForADeadServer(Wrapped):
    """Deadlines: the end of a server is not reported before the deadline."""

    def submit(self, request: Envelope, timeout: float) -> Pending:
        return Patient(self.inner.submit(request, timeout), time.monotonic() + timeout)


class Patient(Pending):
    def __init__(self, inner: Pending, deadline: float) -> None:
        self.inner, self.deadline = inner, deadline

    def done(self, within: float = 0.0) -> bool:
        return self.inner.done(within)

    def result(self) -> Envelope:
        try:
            return self.inner.result()
        except PeerGone as error:
            time.sleep(max(0.0, min(6.0, self.deadline - time.monotonic())))
            raise DeadlineExceeded(str(error)) from None


class AnswersWithTheLastReply(Wrapped):
    """Order: a request gets the reply of the one before it."""

    last: Pending | None = None

    def submit(self, request: Envelope, timeout: float) -> Pending:
        before, self.last = self.last, self.inner.submit(request, timeout)
        return before or self.last


class GivesUpAfterTheServerLeft(Wrapped):
    """Reconnecting: a connection that lost its server reaches no other."""

    def submit(self, request: Envelope, timeout: float) -> Pending:
        assert isinstance(self.inner, ZmqConnection)
        if self.inner._line and self.inner._line.is_over:
            raise PeerGone("the server left once")
        return self.inner.submit(request, timeout)


class SendsAgain(Wrapped):
    """Reconnecting: a request that was under way when the server left is sent to the next one, too."""

    last: Envelope

    def submit(self, request: Envelope, timeout: float) -> Pending:
        assert isinstance(self.inner, ZmqConnection)
        if self.inner._line and self.inner._line.is_over:
            self.inner.submit(self.last, timeout)
        self.last = request
        return self.inner.submit(request, timeout)


class ForOneThread(Wrapped):
    """Threads: a second thread gets no reply while the first one waits."""

    def __init__(self, inner: Connection) -> None:
        super().__init__(inner)
        self.lock = threading.Lock()

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

    def submit(self, request: Envelope, timeout: float) -> Pending:
        return OfOneThread(self.inner.submit(request, timeout), time.monotonic() + timeout)


class OfOneThread(Patient):
    def __init__(self, inner: Pending, deadline: float) -> None:
        super().__init__(inner, deadline)
        self.thread = threading.get_ident()

    def result(self) -> Envelope:
        if threading.get_ident() != self.thread:
            raise ProtocolError("another thread submitted this request")
        return self.inner.result()


class ServesForks(Wrapped):
    """Threads: a fork goes on with the connection of its parent."""

    def submit(self, request: Envelope, timeout: float) -> Pending:
        assert isinstance(self.inner, ZmqConnection)
        if os.getpid() == self.inner._process:
            return self.inner.submit(request, timeout)
        return (
            ZmqTransport(TransportOptions())
            .connect(f"ipc://{self.inner._path}", self.inner._codec)
            .submit(request, timeout)
        )


class LooksByWaiting(Wrapped):
    """``Pending.done``: takes the question for a wait."""

    def submit(self, request: Envelope, timeout: float) -> Pending:
        return Waiting(self.inner.submit(request, timeout), time.monotonic() + timeout)


class Waiting(Patient):
    def done(self, within: float = 0.0) -> bool:
        return self.inner.done(1e6)


class ConnectsAnewAfterItWasClosed(Wrapped):
    """``Connection.close``: ends requests, but not the connection."""

    def close(self) -> None:
        assert isinstance(self.inner, ZmqConnection)
        self.inner.close()
        self.inner = ZmqTransport(TransportOptions()).connect(f"ipc://{self.inner._path}", self.inner._codec)


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

    async def serve(self, endpoint: str, service: Service) -> Server:
        service.codec.version = 1
        return await super().serve(endpoint, service)


class WrappedService(Service):
    """A service as a faulty server calls it."""

    def __init__(self, inner: Service) -> None:
        self.inner, self.codec = inner, inner.codec

    def handle(self, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
        return self.inner.handle(peer, request)

    def gone(self, peer: Peer) -> None:
        self.inner.gone(peer)


class HidesErrors(Sound):
    """``Service.handle``: every error is the same to the caller."""

    async def serve(self, endpoint: str, service: Service) -> Server:
        class Hiding(WrappedService):
            def handle(self, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
                try:
                    return self.inner.handle(peer, request)
                except BlendHubError as error:
                    raise ServiceFailed(str(error)) from error

        return await super().serve(endpoint, Hiding(service))


class DiesOfAnError(Sound):
    """``Service.handle``: behind an error that is not ours, no request is served any more."""

    async def serve(self, endpoint: str, service: Service) -> Server:
        class Mortal(WrappedService):
            is_dead = False

            def handle(self, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
                if self.is_dead:
                    raise ServiceFailed("the service is dead")
                try:
                    return self.inner.handle(peer, request)
                except Exception as error:
                    self.is_dead = not isinstance(error, BlendHubError)
                    raise

        return await super().serve(endpoint, Mortal(service))


class KnowsNoPeers(Sound):
    """``Peer``: all connections have one name."""

    async def serve(self, endpoint: str, service: Service) -> Server:
        class Nameless(WrappedService):
            def handle(self, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
                return self.inner.handle(b"", request)

        return await super().serve(endpoint, Nameless(service))


class ReportsPeersThatStay(Sound):
    """``Service.gone``: a peer that asks is reported as one that left."""

    async def serve(self, endpoint: str, service: Service) -> Server:
        class Leaving(WrappedService):
            def handle(self, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
                self.inner.gone(peer)
                return self.inner.handle(peer, request)

        return await super().serve(endpoint, Leaving(service))


class TakesOverItsEndpoint(Sound):
    """``Transport.serve``: two servers at one endpoint."""

    async def serve(self, endpoint: str, service: Service) -> Server:
        Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        return await super().serve(endpoint, service)


class LeavesItsFile(Sound):
    """``Server.close``: leaves something behind."""

    async def serve(self, endpoint: str, service: Service) -> Server:
        server = await super().serve(endpoint, service)
        Path(f"{endpoint.removeprefix('ipc://')}.lock").touch()
        return server


class TakesAnyNumber(Sound):
    """Bounds: requests wait without a bound, in a server that has no room for them."""

    def __init__(self) -> None:
        super().__init__()
        self._max_pending = 10**6


class SharesOneBound(Sound):
    """Bounds: a connection with many requests leaves no room to the others."""

    async def serve(self, endpoint: str, service: Service) -> Server:
        server = await super().serve(endpoint, service)
        assert isinstance(server, ZmqServer)
        dispatch = server.dispatcher.dispatch
        server.dispatcher.dispatch = lambda _, *rest: dispatch(b"everybody", *rest)
        return server


class DiesOfGarbage(Sound):
    """Hostile input: a frame that is none ends the server."""

    async def serve(self, endpoint: str, service: Service) -> Server:
        server = await super().serve(endpoint, service)
        assert isinstance(server, ZmqServer)
        server.refuse = lambda reason: asyncio.ensure_future(server.close())  # type: ignore[assignment]
        return server


class CountsNoGarbage(Sound):
    """Hostile input: what is refused is not counted."""

    async def serve(self, endpoint: str, service: Service) -> Server:
        server = await super().serve(endpoint, service)
        assert isinstance(server, ZmqServer)
        server.refuse = lambda reason: None
        return server


FAULTS = [
    (AnswersLate, "test_a_request_ends_at_its_deadline_even_if_no_thread_waits"),
    (AnswersWithTheLastReply, "test_a_late_reply_is_dropped"),
    (WaitsForADeadServer, "test_a_server_that_is_killed_is_reported_and_found_again"),
    (WaitsForADeadServer, "test_a_new_server_at_the_same_endpoint_is_found"),
    (IgnoresVersions, "test_versions_that_differ_are_named"),
    (AnswersWithTheLastReply, "test_many_requests_at_once"),
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
    (HidesErrors, "test_an_error_arrives_as_its_class_with_its_sentence"),
    (DiesOfAnError, "test_any_other_exception_is_a_service_failure_and_the_server_lives_on"),
    (KnowsNoPeers, "test_each_connection_is_a_peer_that_leaves_once"),
    (ReportsPeersThatStay, "test_each_connection_is_a_peer_that_leaves_once"),
    (TakesOverItsEndpoint, "test_an_endpoint_has_one_server"),
    (LeavesItsFile, "test_a_server_that_closes_twice_leaves_nothing"),
    (TakesAnyNumber, "test_one_request_too_many_is_answered_busy_at_once_and_later_there_is_room"),
    (SharesOneBound, "test_one_request_too_many_is_answered_busy_at_once_and_later_there_is_room"),
    (DiesOfGarbage, "test_garbage_does_no_harm"),
    (CountsNoGarbage, "test_garbage_is_counted"),
]


class Suite(TransportSuite):
    """That it passes without a fault, plugins/transports tests."""

    max_pending = 600
    plugin: Any

    def create(self) -> Transport:
        return Sound(self.plugin) if issubclass(self.plugin, Wrapped) else self.plugin()

    def send_raw(self, endpoint: str, data: bytes) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 1000)
            stranger.connect(endpoint)
            stranger.send(data)


globals().update(proofs(Suite, FAULTS))


def test_a_faulty_transport_proves_each_test() -> None:
    assert {test for _, test in FAULTS} == all_tests(TransportSuite)
