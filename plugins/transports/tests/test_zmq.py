"""What is particular to ZeroMQ over Unix sockets: files, servers that stand still, clients that flood."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from blendhub_transports import frames, server
from blendhub_transports.options import TransportOptions
from blendhub_transports.zmq_transport import ZmqTransport

from blendhub.contracts import Connection, Envelope
from blendhub.core.errors import Busy, DeadlineExceeded, InvalidInput, PeerGone, ProtocolError
from blendhub.testing.transports.base import EchoRequest, EchoService, Running, check_echo, client_codec, submit

TRANSPORT = ZmqTransport(TransportOptions(max_pending=100))


@pytest.fixture
def path(tmp_path) -> str:
    return f"{tmp_path}/s"


@pytest.fixture
def running(path) -> Iterator[Running]:
    started = Running(TRANSPORT, f"ipc://{path}", EchoService())
    yield started
    started.stop()


@pytest.fixture
def connection(path) -> Iterator[Connection]:
    made = TRANSPORT.connect(f"ipc://{path}", client_codec())
    yield made
    made.close()


@pytest.fixture
def stranger(running) -> Iterator["zmq.Socket[bytes]"]:
    """A client that does as it likes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.RCVTIMEO, 10_000)):
            socket.setsockopt(option, value)
        socket.connect(running.endpoint)
        yield socket


def request(number: int, payload: list[Any], text: str = "", **about: Any) -> list[Any]:
    message = client_codec().encode(EchoRequest(text, **about))
    return frames.encode(1, frames.REQUEST, number, time.monotonic() + 30, message, payload)


def serve(endpoint: str) -> None:
    Running(TRANSPORT, endpoint, EchoService()).stop()


def test_where_no_server_listens_that_is_said_at_once_and_its_file_is_replaced_by_a_private_one(path, connection):
    with pytest.raises(PeerGone, match=f"there is no socket {path}: .* blendhub serve --endpoint ipc://{path}"):
        check_echo(connection, "hello")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with pytest.raises(PeerGone, match=f"no server listens any more at {path}"):
        check_echo(connection, "hello")
    started = Running(TRANSPORT, f"ipc://{path}", EchoService())
    assert os.stat(path).st_mode & 0o777 == 0o600
    check_echo(connection, "hello")
    started.stop()


def test_what_is_wrong_with_an_endpoint_is_said_with_what_mends_it_and_nothing_is_left(tmp_path, path, monkeypatch):
    (tmp_path / "letter").write_text("a letter")
    for endpoint, why in (
        (f"ipc://{tmp_path}/letter", "not a socket"),
        (f"ipc://{tmp_path}/none/s", f"mkdir -p -m 700 {tmp_path}/none"),
        (f"ipc://{tmp_path}/{'x' * 108}", "107 bytes"),
        ("ipc://@abstract", "ipc:///PATH"),
    ):
        with pytest.raises(InvalidInput, match=why):
            serve(endpoint)
    assert (tmp_path / "letter").read_text() == "a letter"

    def fail(*_: object) -> None:
        raise zmq.ZMQError(zmq.EADDRINUSE)

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as broken, pytest.raises(zmq.ZMQError):
        broken.setattr(zmq.Socket, "bind", fail)
        serve(f"ipc://{path}")
    assert os.listdir(tmp_path) == ["letter"] and len(os.listdir("/proc/self/fd")) == before
    serve(f"ipc://{path}")


def test_a_server_that_stands_still_blocks_no_caller(path, connection):
    with socket.socket(socket.AF_UNIX) as still:
        still.bind(path)
        still.listen(2)
        started, payload = time.monotonic(), bytes(2**20)
        with pytest.raises(Busy, match="max_pending"):
            for _ in range(200):
                pending = submit(connection, "hello", [payload], timeout=0.1)
        with pytest.raises(DeadlineExceeded, match="overloaded"):
            pending.result()
        assert time.monotonic() - started < 5


def test_requests_that_are_sent_while_the_server_leaves_end_at_once_as_others_do(path):
    """A socket takes nothing for a moment before the connection knows that the server has left."""
    unbounded, started = ZmqTransport(TransportOptions(max_pending=10**6)), time.monotonic()
    for _ in range(10):
        running = Running(unbounded, f"ipc://{path}", EchoService())
        connection = unbounded.connect(running.endpoint, client_codec())
        check_echo(connection, "here")
        leaving = threading.Thread(target=running.stop)
        leaving.start()
        with pytest.raises(PeerGone):
            while True:
                pending = submit(connection, "anybody?")
        with contextlib.suppress(PeerGone):  # it may have been answered
            pending.result()
        leaving.join()
        connection.close()
    assert time.monotonic() - started < 20


def test_a_client_that_sends_more_than_it_may_is_answered_busy(running, stranger):
    for number in range(101):
        stranger.send_multipart(request(number, [], "slow", seconds=30.0))
    header = frames.read_header(memoryview(stranger.recv()))
    assert header.number == 100 and header.kind == frames.ERROR and running.service.started == 100


def test_the_loop_goes_on_while_a_client_floods_the_server_or_nests_a_message_deeply(running, connection, stranger):
    nested = client_codec().encode(EchoRequest())[:1].replace(b"\x81", b"\x82") + b"\xa1x" + b"\x91" * 100_000
    stranger.send_multipart(frames.encode(1, frames.REQUEST, 1, time.monotonic() + 30, nested, []))
    assert frames.read_header(memoryview(stranger.recv())).kind == frames.ERROR
    n_broken, refused = server.MAX_UNREAD, [1]

    def beat() -> None:
        refused.append(running.server.refused)
        if refused[-1] <= n_broken:
            loop.call_soon(beat)

    loop = running.server._loop
    loop.call_soon_threadsafe(beat)
    loop.call_soon_threadsafe(time.sleep, 0.5)
    for _ in range(n_broken):
        stranger.send_multipart(frames.encode(1, frames.REQUEST, 2, time.monotonic() + 30, b"\x00", []))
    while refused[-1] <= n_broken:
        check_echo(connection, "well served")
    assert max(map(int.__sub__, refused[1:], refused)) <= server.BATCH, "the loop reads more before it does other work"


def test_what_is_too_large_or_no_buffer_is_sent_by_no_client_and_taken_from_none(running, connection, stranger):
    with pytest.raises(ProtocolError, match="at most 68,157,440"):
        submit(connection, "", [bytes(frames.MAX_BYTES)])
    unsuitable: list[Any] = ["text", memoryview(b"abcdef")[::2]]
    for buffer in unsuitable:
        with pytest.raises(InvalidInput, match="contiguous"):
            connection.submit(Envelope(EchoRequest(), [buffer]), 5.0)
    assert running.service.started == 0
    stranger.send_multipart([bytes(request(7, [])[0]), bytes(2**26), bytes(2**21)])
    (reply,) = stranger.recv_multipart()
    answer = frames.read_header(memoryview(reply))
    assert answer.number == 7 and answer.kind == frames.ERROR and running.server.refused == 1
    with pytest.raises(ProtocolError, match="a message of 69,2"):
        frames.decode(answer, [memoryview(reply)], client_codec(), reader="the client", writer="the server")
    check_echo(connection, "still here")
