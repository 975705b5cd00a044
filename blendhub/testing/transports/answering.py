"""Every request gets its reply, whichever other requests are under way."""

import random
import threading
import time

import pytest

from blendhub.contracts import Connection, Envelope
from blendhub.contracts.transport import Buffer
from blendhub.core import errors
from blendhub.core.errors import BlendHubError, InvalidInput, ServiceFailed
from blendhub.testing.sentences import holds
from blendhub.testing.transports.base import LONG, SOON, Connect, EchoReply, EchoRequest, Serve, TransportTests

MIB = 2**20


@holds("Every request ends by its deadline, with its reply or with a typed error:")
class AnsweringTests(TransportTests):
    def test_a_request_gets_its_reply(self, connection: Connection) -> None:
        assert connection.call(Envelope(EchoRequest("hello")), LONG).message == EchoReply("hello")

    @holds("A message, and raw buffers that travel with it without being encoded.")
    def test_payloads_arrive_whole_and_in_order(self, connection: Connection) -> None:
        for sizes in ((), (0,), (1,), (5, 0, 70_000), (16 * MIB, 3)):
            payload = [random.Random(size).randbytes(size) for size in sizes]
            reply = connection.call(Envelope(EchoRequest("take this"), payload), LONG)
            assert [bytes(part) for part in reply.payload] == payload
        any_buffers: list[Buffer] = [bytearray(b"one"), memoryview(b"xtwox")[1:4]]
        reply = connection.call(Envelope(EchoRequest(""), any_buffers), LONG)
        assert [bytes(part) for part in reply.payload] == [b"one", b"two"]

    @holds("Replies may come in any order; each finds its own request.")
    def test_replies_come_in_any_order(self, connection: Connection) -> None:
        slow = connection.submit(Envelope(EchoRequest("slow", seconds=0.5)), LONG)
        quick = connection.submit(Envelope(EchoRequest("quick")), LONG)
        assert quick.result().message == EchoReply("quick")
        assert not slow.done()
        assert slow.result().message == EchoReply("slow")

    @holds("Whether ``result`` would return or raise at once.")
    def test_a_pending_request_can_be_asked_again_and_again(self, connection: Connection) -> None:
        pending = connection.submit(Envelope(EchoRequest("x", seconds=0.1)), LONG)
        deadline = time.monotonic() + LONG
        while not pending.done():
            assert time.monotonic() < deadline
        assert pending.result().message == pending.result().message == EchoReply("x")

    def test_many_requests_at_once(self, connection: Connection) -> None:
        pending = [connection.submit(Envelope(EchoRequest(str(number))), LONG) for number in range(500)]
        for number, one in reversed(list(enumerate(pending))):
            assert one.result().message == EchoReply(str(number))

    @holds("All methods may be called from several threads at once.")
    def test_threads_share_a_connection(self, connection: Connection) -> None:
        wrong: list[object] = []

        def ask(name: int) -> None:
            for number in range(40):
                text = f"{name}-{number}"
                reply = connection.call(
                    Envelope(EchoRequest(text, seconds=0.001 * (number % 3)), [text.encode()]), LONG
                )
                if reply.message != EchoReply(text) or bytes(reply.payload[0]) != text.encode():
                    wrong.append(reply)

        threads = [threading.Thread(target=ask, args=(name,)) for name in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LONG)
            assert not thread.is_alive(), "a thread is still waiting"
        assert not wrong

    @holds("All methods may be called from several threads at once.")
    def test_a_thread_may_wait_for_what_another_submitted(self, connection: Connection) -> None:
        pending = connection.submit(Envelope(EchoRequest("x", seconds=0.2)), LONG)
        replies: list[Envelope] = []
        threads = [threading.Thread(target=lambda: replies.append(pending.result())) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert connection.call(Envelope(EchoRequest("y")), LONG).message == EchoReply("y")
        for thread in threads:
            thread.join(LONG)
        assert [reply.message for reply in replies] == [EchoReply("x")] * 3

    @holds("A BlendHubError reaches the caller as the same class with the same sentence;")
    def test_an_error_arrives_as_its_class_with_its_sentence(self, connection: Connection) -> None:
        for name in sorted(
            kind.__name__ for kind in BlendHubError.__subclasses__() if kind.__module__ == errors.__name__
        ):
            with pytest.raises(getattr(errors, name), match="asked to fail: for good reason"):
                connection.call(Envelope(EchoRequest("for good reason", fail=name)), LONG)

    @holds("A BlendHubError reaches the caller as the same class with the same sentence;")
    def test_any_other_exception_is_a_service_failure_and_the_server_lives_on(self, connection: Connection) -> None:
        for _ in range(3):
            with pytest.raises(ServiceFailed):
                connection.call(Envelope(EchoRequest("boom", fail="not an error of ours")), LONG)
        assert connection.call(Envelope(EchoRequest("alive")), LONG).message == EchoReply("alive")

    @holds("A connection to a server, which need not run yet.")
    def test_a_client_may_come_before_its_server(self, serve: Serve, connect: Connect) -> None:
        first = serve()
        endpoint = first.endpoint
        first.stop()
        connection = connect(endpoint)
        with pytest.raises(errors.TransportError):
            connection.call(Envelope(EchoRequest("anybody?")), 0.2)
        serve(endpoint=endpoint)
        deadline = time.monotonic() + SOON
        while True:
            try:
                assert connection.call(Envelope(EchoRequest("now")), 1.0).message == EchoReply("now")
                return
            except errors.TransportError:
                assert time.monotonic() < deadline

    def test_every_request_has_a_deadline(self, connection: Connection) -> None:
        for timeout in (-1, float("nan"), float("inf"), "1", None):
            with pytest.raises(InvalidInput, match="timeout"):
                connection.submit(Envelope(EchoRequest("")), timeout)  # type: ignore[arg-type]

    @holds("Prefixes of the endpoints that it supports, such as ``ipc://``.")
    def test_an_endpoint_that_is_not_understood_is_refused(self, serve: Serve) -> None:
        codec = serve().service.codec
        for endpoint in ("", "nonsense", "nonsense://x", "ipc://", "tcp://127.0.0.1", "inproc://"):
            with pytest.raises(InvalidInput, match="endpoint"):
                self.create().connect(endpoint, codec)
