"""Connections that ask nothing: how many a server keeps, whose it closes, and that newcomers get in meanwhile."""

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from blendhub_transports import admission, listener
from blendhub_transports.options import ZmqOptions
from blendhub_transports.zmq_transport import ZmqTransport

from blendhub.core.errors import TransportError
from blendhub.testing.transports.base import Running, check_echo, client_codec

FEW = ZmqOptions(max_connections=20)


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request, tmp_path) -> str:
    return f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:0"


@pytest.fixture
def idle() -> Iterator[Callable[..., list[socket.socket]]]:
    """Opens connections that send nothing."""
    opened: list[socket.socket] = []

    def connect(endpoint: str, n: int, source: str = "127.0.0.1") -> list[socket.socket]:
        for _ in range(n):
            one = socket.socket(socket.AF_UNIX if endpoint.startswith("ipc") else socket.AF_INET)
            opened.append(one)
            if one.family == socket.AF_UNIX:
                one.connect(endpoint.removeprefix("ipc://"))
            else:
                one.bind((source, 0))
                one.connect(("127.0.0.1", int(endpoint.rpartition(":")[2])))
        return opened[-n:]

    yield connect
    for one in opened:
        one.close()


def ended(sockets: list[socket.socket]) -> list[bool]:
    """Which of these the server has closed."""
    for one in sockets:
        one.setblocking(False)
    found = []
    for one in sockets:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while one.recv(4096):  # what ZeroMQ sends first
                pass
        readable, _, _ = select.select([one], [], [], 0)
        found.append(bool(readable))
    return found


def until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def ask(server: Running, timeout: float = 10.0):
    connection = ZmqTransport(ZmqOptions()).connect(server.endpoint, client_codec())
    check_echo(connection, "hello", timeout)
    return connection


def test_the_oldest_connections_without_a_request_are_closed_and_a_line_says_why(serve, endpoint, idle, caplog):
    server = serve(endpoint, FEW)
    asking = ask(server)
    with caplog.at_level(logging.WARNING):
        silent = idle(server.endpoint, 50)
        ask(server).close()
    until(lambda: sum(ended(silent)) >= 30)
    assert not all(ended(silent)) and server.server.refused >= 30
    check_echo(asking, "still here")
    asking.close()
    (line,) = caplog.messages
    assert "which sent no request, the last of" in line and "The limit: max_connections = 20; raise it" in line


def test_where_all_have_asked_the_newcomer_is_refused(serve, endpoint, caplog):
    server = serve(endpoint, ZmqOptions(max_connections=2))
    kept = [ask(server) for _ in range(2)]
    with caplog.at_level(logging.WARNING), pytest.raises(TransportError):
        ask(server, 0.5)
    for one in kept:
        check_echo(one, "still here")
    kept[0].close()
    ask(server).close()
    kept[1].close()
    assert "max_connections = 2" in caplog.text


def test_an_address_that_connects_often_costs_no_other_its_connection(serve, idle):
    server = serve("tcp://127.0.0.1:0", FEW)
    (other,) = idle(server.endpoint, 1)
    many = idle(server.endpoint, 60, source="127.0.0.2")
    until(lambda: sum(ended(many)) >= 40)
    assert ended([other]) == [False]


def test_a_handshake_that_does_not_end_is_closed_early(serve, endpoint, idle, monkeypatch):
    assert listener.HANDSHAKE_MS <= 5000
    monkeypatch.setattr(listener, "HANDSHAKE_MS", 200)
    server = serve(endpoint)
    silent = idle(server.endpoint, 5)
    half = idle(server.endpoint, 5)
    for one in half:
        one.send(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03")
    until(lambda: all(ended(silent + half)))
    ask(server).close()


def test_a_connection_that_could_not_be_counted_shuts_out_no_other(serve, endpoint, monkeypatch):
    server = serve(endpoint)
    with monkeypatch.context() as trouble:
        trouble.setattr(admission, "_source", lambda *of: 1 / 0)
        with contextlib.suppress(TransportError):
            ask(server, 0.5)
    ask(server).close()


def test_without_proc_the_server_serves_and_a_line_says_what_is_not_bounded(
    serve, endpoint, monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(admission, "FDINFO", tmp_path / "none")
    server = serve(endpoint)
    ask(server).close()
    assert "more connections than a limit may be accepted" in caplog.text
