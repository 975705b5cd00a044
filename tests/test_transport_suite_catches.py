"""A suite that nothing fails is worth nothing: transports with one fault each, and the test that must see it."""

from collections.abc import Awaitable, Callable
from functools import partial
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


class Wrapped(Connection):
    """A connection whose faults are in subclasses."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self.connect = connect
        self.inner = connect()
        self.last: Pending | None = None

    def submit(self, request: Envelope, timeout: float) -> Pending:
        return self.inner.submit(request, timeout)

    def close(self) -> None:
        self.inner.close()


class Sound(ZmqTransport):
    def __init__(self, wrap: type[Wrapped] = Wrapped) -> None:
        super().__init__(ZmqOptions(max_pending=600))
        self.wrap = wrap

    def connect(self, endpoint: str, codec: Codec) -> Connection:
        return self.wrap(partial(super().connect, endpoint, codec))


class AnswersWithTheLastReply(Wrapped):
    def submit(self, request: Envelope, timeout: float) -> Pending:
        before, self.last = self.last, self.inner.submit(request, timeout)
        return before or self.last


class DropsEmptyBuffers(Wrapped):
    def submit(self, request: Envelope, timeout: float) -> Pending:
        return self.inner.submit(Envelope(request.message, [part for part in request.payload if part]), timeout)


class TakesAnyTimeout(Wrapped):
    def submit(self, request: Envelope, timeout: float) -> Pending:
        try:
            return self.inner.submit(request, timeout)
        except InvalidInput:
            return self.inner.submit(request, 1.0)


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


class WaitsWhereItShouldLook(Wrapped):
    def submit(self, request: Envelope, timeout: float) -> Pending:
        return Impatient(self.inner.submit(request, timeout))


class ConnectsAnewAfterItWasClosed(Wrapped):
    def close(self) -> None:
        self.inner.close()
        self.inner = self.connect()


class GivesUpAfterTheServerLeft(Wrapped):
    def call(self, request: Envelope, timeout: float) -> Envelope:
        try:
            return super().call(request, timeout)
        except PeerGone:
            self.close()
            raise


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
            made = globals()[fault]
            return Sound(made) if issubclass(made, Wrapped) else made()

    return Suite


@pytest.mark.parametrize("faulty, test", FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_suite_catches(faulty: type, test: str, tmp_path: Path) -> None:
    assert not passes(__name__, faulty.__name__, test, tmp_path), f"{test} lets {faulty.__name__} pass"


def test_without_a_fault_there_is_nothing_to_catch(tmp_path: Path) -> None:
    """All of these tests: plugins/transports runs the whole suite."""
    assert passes(__name__, "Sound", "test_a_new_server_at_the_same_endpoint_is_found", tmp_path)
