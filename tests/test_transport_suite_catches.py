"""A suite that nothing fails is worth nothing: transports with one fault each, and the test that must see it."""

from collections.abc import Awaitable
from pathlib import Path

import pytest
from blendhub_transports.options import ZmqOptions
from blendhub_transports.zmq_transport import ZmqTransport

from blendhub.contracts import Codec, Connection, Envelope, Pending, Server, Service, Transport
from blendhub.contracts.transport import Peer
from blendhub.core.errors import BlendHubError, InvalidInput, PeerGone, ServiceFailed
from blendhub.testing import TransportSuite
from tests.suite_runs import passes

pytestmark = pytest.mark.slow


class Sound(ZmqTransport):
    def __init__(self) -> None:
        super().__init__(ZmqOptions(max_pending=600))


class Wrapped(Connection):
    """A connection whose faults are in subclasses."""

    def __init__(self, inner: Connection) -> None:
        self.inner = inner

    def submit(self, request: Envelope, timeout: float) -> Pending:
        return self.inner.submit(request, timeout)

    def close(self) -> None:
        self.inner.close()


class AnswersWithTheLastReply(Sound):
    def connect(self, endpoint: str, codec: Codec) -> Connection:
        class Mixed(Wrapped):
            last: Pending | None = None

            def submit(self, request: Envelope, timeout: float) -> Pending:
                before, self.last = self.last, self.inner.submit(request, timeout)
                return before or self.last

        return Mixed(super().connect(endpoint, codec))


class DropsEmptyBuffers(Sound):
    def connect(self, endpoint: str, codec: Codec) -> Connection:
        class Dropping(Wrapped):
            def submit(self, request: Envelope, timeout: float) -> Pending:
                return self.inner.submit(Envelope(request.message, [part for part in request.payload if part]), timeout)

        return Dropping(super().connect(endpoint, codec))


class TakesAnyTimeout(Sound):
    def connect(self, endpoint: str, codec: Codec) -> Connection:
        class Lenient(Wrapped):
            def submit(self, request: Envelope, timeout: float) -> Pending:
                try:
                    return self.inner.submit(request, timeout)
                except InvalidInput:
                    return self.inner.submit(request, 1.0)

        return Lenient(super().connect(endpoint, codec))


class Impatient(Pending):
    """Takes the question whether it is done for a wait, and forgets the reply once it was asked for."""

    def __init__(self, inner: Pending) -> None:
        self.inner: Pending | None = inner

    def done(self) -> bool:
        return bool(self.result())

    def result(self) -> Envelope:
        if self.inner is None:
            raise PeerGone("it was asked for before")
        inner, self.inner = self.inner, None
        return inner.result()


class WaitsWhereItShouldLook(Sound):
    def connect(self, endpoint: str, codec: Codec) -> Connection:
        class Waiting(Wrapped):
            def submit(self, request: Envelope, timeout: float) -> Pending:
                return Impatient(self.inner.submit(request, timeout))

        return Waiting(super().connect(endpoint, codec))


class ConnectsAnewAfterItWasClosed(Sound):
    def connect(self, endpoint: str, codec: Codec) -> Connection:
        again = super().connect

        class Reviving(Wrapped):
            def close(self) -> None:
                self.inner.close()
                self.inner = again(endpoint, codec)

        return Reviving(super().connect(endpoint, codec))


class GivesUpAfterTheServerLeft(Sound):
    def connect(self, endpoint: str, codec: Codec) -> Connection:
        class Discouraged(Wrapped):
            def call(self, request: Envelope, timeout: float) -> Envelope:
                try:
                    return super().call(request, timeout)
                except PeerGone:
                    self.close()
                    raise

        return Discouraged(super().connect(endpoint, codec))


class TakesAnyEndpoint(Sound):
    def connect(self, endpoint: str, codec: Codec) -> Connection:
        return super().connect(endpoint if "://" in endpoint else f"ipc:///{endpoint}", codec)


class IgnoresVersions(Sound):
    def connect(self, endpoint: str, codec: Codec) -> Connection:
        codec.version = 1
        return super().connect(endpoint, codec)

    async def serve(self, endpoint: str, service: Service) -> Server:
        service.codec.version = 1
        return await super().serve(endpoint, service)


class HidesErrors(Sound):
    async def serve(self, endpoint: str, service: Service) -> Server:
        class Hiding(Service):
            codec = service.codec

            def handle(self, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
                try:
                    return service.handle(peer, request)
                except BlendHubError as error:
                    raise ServiceFailed(str(error)) from error

        return await super().serve(endpoint, Hiding())


class TakesOverItsEndpoint(Sound):
    async def serve(self, endpoint: str, service: Service) -> Server:
        Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        return await super().serve(endpoint, service)


FAULTS = [
    (AnswersWithTheLastReply, "test_many_requests_at_once"),
    (AnswersWithTheLastReply, "test_threads_share_a_connection"),
    (DropsEmptyBuffers, "test_payloads_arrive_whole_and_in_order"),
    (TakesAnyTimeout, "test_every_request_has_a_deadline"),
    (WaitsWhereItShouldLook, "test_replies_come_in_any_order"),
    (WaitsWhereItShouldLook, "test_a_pending_request_can_be_asked_again_and_again"),
    (ConnectsAnewAfterItWasClosed, "test_a_connection_that_closes_ends_its_requests"),
    (GivesUpAfterTheServerLeft, "test_a_new_server_at_the_same_endpoint_is_found"),
    (TakesAnyEndpoint, "test_an_endpoint_that_is_not_understood_is_refused"),
    (IgnoresVersions, "test_versions_that_differ_are_named"),
    (HidesErrors, "test_an_error_arrives_as_its_class_with_its_sentence"),
    (TakesOverItsEndpoint, "test_an_endpoint_has_one_server"),
]


def suite_of(fault: str) -> type[TransportSuite]:
    class Suite(TransportSuite):
        max_pending = 600

        def create(self) -> Transport:
            return globals()[fault]()

    return Suite


@pytest.mark.parametrize("faulty, test", FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_suite_catches(faulty: type[Sound], test: str, tmp_path: Path) -> None:
    assert not passes(__name__, faulty.__name__, test, tmp_path), f"{test} lets {faulty.__name__} pass"


def test_without_a_fault_there_is_nothing_to_catch(tmp_path: Path) -> None:
    """All of these tests: plugins/transports runs the whole suite."""
    assert passes(__name__, "Sound", "test_a_new_server_at_the_same_endpoint_is_found", tmp_path)
