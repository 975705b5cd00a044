"""The tests of every transport."""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blendhub.contracts import Connection
from blendhub.core import errors
from blendhub.core.errors import (
    BlendHubError,
    Busy,
    DeadlineExceeded,
    InvalidInput,
    PeerGone,
    ServiceFailed,
    TransportError,
    VersionMismatch,
)
from blendhub.testing.sentences import holds
from blendhub.testing.transports.base import (
    FORK,
    LONG,
    MIB,
    Connect,
    EchoReply,
    EchoService,
    Running,
    Serve,
    TransportTests,
    check_echo,
    submit,
    submit_slow,
)
from blendhub.testing.transports.guarding import GuardingTests, HostileTests


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
        slow, pending = submit(connection, "slow", seconds=0.5), [submit(connection, str(n)) for n in range(500)]
        for number, request in reversed(list(enumerate(pending))):
            assert request.result().message == EchoReply(str(number))
        assert not slow.done()
        assert slow.result().message == EchoReply("slow")

    @holds("Whether ``result`` would return or raise at once.")
    def test_a_pending_request_can_be_asked_again_and_by_any_thread(self, connection: Connection) -> None:
        pending, started = submit(connection, "x", seconds=0.2), time.monotonic()
        assert not pending.done() and not pending.done(0.05) and time.monotonic() - started >= 0.05
        with ThreadPoolExecutor(3) as threads:
            replies = [threads.submit(pending.result) for _ in range(3)]
            check_echo(connection, "y")
            assert [reply.result(LONG).message for reply in replies] == [EchoReply("x")] * 3
        assert pending.done(LONG) and time.monotonic() - started < self.soon_s

    @holds("All methods may be called from several threads at once.")
    def test_threads_share_a_connection(self, connection: Connection) -> None:
        def ask(name: int) -> None:
            for number in range(40):
                text = f"{name}-{number}"
                reply = submit(connection, text, [text.encode()], seconds=0.001 * (number % 3)).result()
                assert reply.message == EchoReply(text) and bytes(reply.payload[0]) == text.encode()

        with ThreadPoolExecutor(32) as threads:
            list(threads.map(ask, range(32), timeout=2 * LONG))

    @holds("A BlendHubError reaches the caller as the same class with the same sentence;")
    def test_errors_arrive_and_the_server_lives_on(self, connection: Connection) -> None:
        for kind in BlendHubError.__subclasses__():
            if kind.__module__ == errors.__name__:
                with pytest.raises(kind, match="asked to fail: for good reason"):
                    submit(connection, "for good reason", fail=kind.__name__).result()
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

    def test_a_request_ends_at_its_deadline_even_if_no_thread_waits(self, connection: Connection) -> None:
        check_echo(connection, "warm")
        started = time.monotonic()
        waited_for, left_alone, late = (
            submit(connection, "late", timeout=0.3, seconds=seconds) for seconds in (LONG, LONG, 0.4)
        )
        with pytest.raises(DeadlineExceeded):
            waited_for.result()
        assert 0.25 < time.monotonic() - started < self.soon_s
        assert left_alone.done(0.1)
        for pending in (left_alone, late):
            with pytest.raises(DeadlineExceeded):
                pending.result()
        time.sleep(0.2)
        check_echo(connection, "not the late reply")

    @holds("A server holds at most a bounded number of requests of a connection; one more")
    def test_one_request_too_many_is_answered_busy_at_once_and_later_there_is_room(
        self, server: Running, connect: Connect
    ) -> None:
        connection, other = (connect(server.endpoint) for _ in range(2))
        pending, n_busy, started = [], 0, time.monotonic()
        for _ in range(self.max_pending + 20):
            try:
                pending.append(submit_slow(connection, 2.0))
            except Busy:
                n_busy += 1
        for request in pending[self.max_pending :]:
            with pytest.raises(Busy):
                request.result()
            n_busy += 1
        assert n_busy >= 20 and time.monotonic() - started < self.soon_s
        while server.service.started < self.max_pending and time.monotonic() - started < self.soon_s:
            time.sleep(0.01)
        check_echo(other, "the bound is each connection's")
        with pytest.raises(DeadlineExceeded):
            pending[0].result()
        self.until_it_answers(connection)

    @holds("VersionMismatch when the two sides' codecs differ")
    def test_versions_that_differ_are_named(self, serve: Serve, connect: Connect) -> None:
        service = EchoService(2)
        endpoint = serve(service).endpoint
        for ours in (1, 3):
            connection = connect(endpoint, version=ours)
            with pytest.raises(VersionMismatch) as raised:
                submit(connection, "hello").result()
            assert str(ours) in str(raised.value) and "2" in str(raised.value)
        assert service.started == 0


@holds("PeerGone when the server died or left meanwhile (as soon as the transport")
class EndingTests(TransportTests):
    @holds("Stop listening, cancel what is under way, and leave nothing behind (socket")
    def test_a_server_that_closes_twice_leaves_nothing(self, server: Running, path: Path) -> None:
        server.run(server.server.close())
        server.run(server.server.close())
        assert not list(path.iterdir())

    @holds("End the connection; requests under way end with PeerGone.")
    def test_a_connection_that_closes_ends_its_requests(self, connection: Connection) -> None:
        pending = submit_slow(connection)
        connection.close()
        with pytest.raises(PeerGone):
            pending.result()
        with pytest.raises(PeerGone):
            submit(connection, "too late").result()
        connection.close()

    @holds("A connection to a server, which need not run yet.")
    def test_a_client_may_come_before_its_server(self, serve: Serve, connect: Connect, path: Path) -> None:
        connection = connect(self.endpoint(path))
        with pytest.raises(TransportError):
            check_echo(connection, "anybody?", 0.2)
        serve()
        self.until_it_answers(connection)

    @holds("After the server went away, new requests work as soon as a server is back.")
    def test_a_new_server_at_the_same_endpoint_is_found(self, server: Running, serve: Serve, connect: Connect) -> None:
        connection = connect(server.endpoint)
        for _ in range(3):
            check_echo(connection, "here")
            under_way, started = submit_slow(connection), time.monotonic()
            server.stop()
            with pytest.raises(PeerGone):
                under_way.result()
            assert time.monotonic() - started < self.soon_s
            server = serve(endpoint=server.endpoint)
            self.until_it_answers(connection)
            assert server.service.started == 1, "a request that was under way was sent again"

    @holds("Raises InvalidInput if a server listens there already.")
    def test_an_endpoint_has_one_server(self, server: Running, serve: Serve, connection: Connection) -> None:
        with pytest.raises(InvalidInput):
            serve(endpoint=server.endpoint)
        check_echo(connection, "still here")

    @pytest.mark.slow
    def test_a_server_that_is_killed_is_reported_and_found_again(self, path: Path, connect: Connect) -> None:
        if "one_process" in self.capabilities:
            pytest.skip("client and server are one process, so the server cannot be killed alone")
        endpoint = self.endpoint(path)
        connection = connect(endpoint)
        for _ in range(3):
            server = FORK.Process(target=lambda: Running(self.create(), endpoint, EchoService()).join(), daemon=True)
            server.start()
            self.until_it_answers(connection)
            pending = submit_slow(connection)
            assert not pending.done(0.1)
            server.kill()
            with pytest.raises(PeerGone):
                pending.result()
            server.join()

    @pytest.mark.slow
    @holds("A forked process makes its own.")
    def test_a_fork_does_not_use_the_connection_of_its_parent(self, connection: Connection) -> None:
        if "one_process" in self.capabilities:
            pytest.skip("a fork has no server to talk to")
        check_echo(connection, "parent")
        under_way = submit(connection, "parent's", seconds=1.0)

        def use() -> None:
            try:
                submit(connection, "child", timeout=1.0).result()
            except BlendHubError:
                connection.close()
                os._exit(0)
            os._exit(1)

        child = FORK.Process(target=use)
        child.start()
        child.join(LONG)
        assert child.exitcode == 0
        under_way.result()
        check_echo(connection, "parent")


class TransportSuite(AnsweringTests, EndingTests, GuardingTests, HostileTests):
    """Subclass it as ``class TestMine(TransportSuite)`` with ``create``."""
