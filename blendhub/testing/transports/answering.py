"""Every request gets its reply, whichever other requests are under way."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from blendhub.contracts import Connection
from blendhub.core import errors
from blendhub.core.errors import BlendHubError, InvalidInput, ServiceFailed
from blendhub.testing.sentences import holds
from blendhub.testing.transports.base import (
    LONG,
    SOON,
    Connect,
    EchoReply,
    Running,
    Serve,
    TransportTests,
    check_echo,
    submit,
)

MIB = 2**20


@holds("Every request ends by its deadline, with its reply or with a typed error:")
class AnsweringTests(TransportTests):
    @holds("A message, and raw buffers that travel with it without being encoded.")
    def test_payloads_arrive_whole_and_in_order(self, connection: Connection) -> None:
        for sizes in ((), (0,), (1,), (5, 0, 70_000), (16 * MIB, 3)):
            payload = [random.Random(size).randbytes(size) for size in sizes]
            reply = submit(connection, "take this", payload).result()
            assert [bytes(part) for part in reply.payload] == payload
        reply = submit(connection, "", [bytearray(b"one"), memoryview(b"xtwox")[1:4]]).result()
        assert [bytes(part) for part in reply.payload] == [b"one", b"two"]

    @holds("Replies may come in any order; each finds its own request.")
    def test_replies_come_in_any_order(self, connection: Connection) -> None:
        slow = submit(connection, "slow", seconds=0.5)
        check_echo(connection, "quick")
        assert not slow.done()
        assert slow.result().message == EchoReply("slow")

    @holds("Whether ``result`` would return or raise at once.")
    def test_a_pending_request_can_be_asked_again_and_again(self, connection: Connection) -> None:
        pending = submit(connection, "x", seconds=0.2)
        started = time.monotonic()
        assert not pending.done() and not pending.done(0.05) and time.monotonic() - started >= 0.05
        assert pending.done(LONG) and time.monotonic() - started < SOON
        assert pending.result().message == pending.result().message == EchoReply("x")

    @holds("Replies may come in any order; each finds its own request.")
    def test_many_requests_at_once(self, connection: Connection) -> None:
        pending = [submit(connection, str(number)) for number in range(500)]
        for number, request in reversed(list(enumerate(pending))):
            assert request.result().message == EchoReply(str(number))

    @holds("All methods may be called from several threads at once.")
    def test_threads_share_a_connection(self, connection: Connection) -> None:
        def ask(name: int) -> None:
            for number in range(40):
                text = f"{name}-{number}"
                reply = submit(connection, text, [text.encode()], seconds=0.001 * (number % 3)).result()
                assert reply.message == EchoReply(text) and bytes(reply.payload[0]) == text.encode()

        with ThreadPoolExecutor(32) as threads:
            list(threads.map(ask, range(32), timeout=2 * LONG))

    @holds("All methods may be called from several threads at once.")
    def test_a_thread_may_wait_for_what_another_submitted(self, connection: Connection) -> None:
        pending = submit(connection, "x", seconds=0.2)
        with ThreadPoolExecutor(3) as threads:
            replies = [threads.submit(pending.result) for _ in range(3)]
            check_echo(connection, "y")
            assert [reply.result(LONG).message for reply in replies] == [EchoReply("x")] * 3

    @holds("A BlendHubError reaches the caller as the same class with the same sentence;")
    def test_an_error_arrives_as_its_class_with_its_sentence(self, connection: Connection) -> None:
        for name in sorted(
            kind.__name__ for kind in BlendHubError.__subclasses__() if kind.__module__ == errors.__name__
        ):
            with pytest.raises(getattr(errors, name), match="asked to fail: for good reason"):
                submit(connection, "for good reason", fail=name).result()

    @holds("A BlendHubError reaches the caller as the same class with the same sentence;")
    def test_any_other_exception_is_a_service_failure_and_the_server_lives_on(self, connection: Connection) -> None:
        for _ in range(3):
            with pytest.raises(ServiceFailed):
                submit(connection, "boom", fail="not an error of ours").result()
        check_echo(connection, "alive")

    @holds("Prefixes of the endpoints that it supports, such as ``ipc://``.")
    def test_an_endpoint_that_is_not_understood_is_refused(self, server: Running) -> None:
        for endpoint in ("", "nonsense", "nonsense://x", "ipc://", "tcp://127.0.0.1:7070", "inproc://"):
            with pytest.raises(InvalidInput, match="endpoint"):
                self.create().connect(endpoint, server.service.codec)

    @holds("The name of one connection to a server. No other connection has it, by whichever")
    def test_each_connection_is_a_peer_that_leaves_once(self, serve: Serve, connect: Connect) -> None:
        server = serve()
        connections = [connect(server.endpoint) for _ in range(3)]
        for connection in (*connections, *connections):
            check_echo(connection, "hello")
        peers = server.service.peers
        assert len(set(peers)) == 3 and peers[:3] == peers[3:]
        connections[0].close()
        check_echo(connections[1], "still here")
        time.sleep(0.2)
        assert server.service.peers_gone in ([], peers[:1]), "a transport that cannot notice this never calls it"
