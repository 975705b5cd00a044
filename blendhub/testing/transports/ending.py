"""A dead peer is reported, not waited for; a server that comes back is found again."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from blendhub.contracts import Connection
from blendhub.core.errors import BlendHubError, InvalidInput, PeerGone, TransportError
from blendhub.testing.sentences import holds
from blendhub.testing.transports.base import (
    LONG,
    SOON,
    Connect,
    EchoService,
    Running,
    Serve,
    TransportTests,
    check_echo,
    submit,
    submit_slow,
)

FORK = multiprocessing.get_context("fork")


def _until_it_answers(connection: Connection) -> None:
    """The connection reaches the server again, or for the first time."""
    started = time.monotonic()
    while True:
        try:
            return check_echo(connection, "back", 1.0)
        except TransportError:
            assert time.monotonic() - started < SOON, "the server is there, but the connection does not reach it"
            time.sleep(0.01)


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
        _until_it_answers(connection)

    @holds("After the server went away, new requests work as soon as a server is back.")
    def test_a_new_server_at_the_same_endpoint_is_found(self, server: Running, serve: Serve, connect: Connect) -> None:
        connection = connect(server.endpoint)
        for _ in range(3):
            check_echo(connection, "here")
            under_way, started = submit_slow(connection), time.monotonic()
            server.stop()
            with pytest.raises(PeerGone):
                under_way.result()
            assert time.monotonic() - started < SOON
            server = serve(endpoint=server.endpoint)
            _until_it_answers(connection)
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
            _until_it_answers(connection)
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
