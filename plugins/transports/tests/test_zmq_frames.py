"""What a server of ZeroMQ does with the frames of a bare socket: order, fairness, and frames that are wrong."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from blendhub_transports import frames
from blendhub_transports.frames import decode_error

from blendhub.core.errors import (
    BlendHubError,
    ProtocolError,
    VersionMismatch,
)
from blendhub.testing.transports.base import EchoRequest, Running, client_codec


@pytest.fixture
def bare(serve, tmp_path) -> Iterator[tuple[Running, "zmq.Socket[bytes]"]]:
    """A server, and a bare socket that talks to it."""
    server = serve(f"ipc://{tmp_path}/s")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.connect(server.endpoint)
        yield server, dealer


def a_request(number: int, text: str = "hello") -> bytes:
    message = client_codec().encode(EchoRequest(text))
    return frames.request(1, number, message, 10_000, time.time())


def read_replies(dealer: "zmq.Socket[bytes]", numbers: set[int]) -> None:
    """Read until all of these requests are answered, each once and in a frame without others."""
    missing = set(numbers)
    while missing:
        frame = memoryview(dealer.recv())
        assert not dealer.getsockopt(zmq.RCVMORE)
        header = frames.read_header(frame)
        assert header.kind == frames.REPLY and client_codec().decode(frames.message(frame)).text
        missing.remove(header.number)


def while_the_server_is_busy(server: Running, work: Callable[[], None]) -> None:
    asleep = threading.Event()

    async def sleep() -> None:
        asleep.set()
        time.sleep(0.2)  # on the loop, so that all requests are there when it reads again

    busy = threading.Thread(target=lambda: server.run(sleep()))
    busy.start()
    asleep.wait()
    work()
    busy.join()


@pytest.mark.parametrize("text", ["hello", "x" * 1500])
def test_each_request_is_answered_once_in_a_frame_without_others(bare, text):
    server, dealer = bare
    numbers = set(range(200))  # more than the server reads in one turn

    def send() -> None:
        for number in numbers:
            dealer.send(a_request(number, text=text))

    while_the_server_is_busy(server, send)
    read_replies(dealer, numbers)
    assert server.service.started == 200 and server.server.refused == 0


@pytest.mark.alone
def test_a_reply_does_not_wait_for_the_work_of_later_requests(bare):
    """The first reply arrives while the handler of the second request blocks the loop."""
    server, dealer = bare
    echo = server.service.handle
    first_arrived = threading.Event()
    in_time: list[bool] = []

    def handle(peer, request):
        if request.message.text == "long":
            in_time.append(first_arrived.wait(10))
        return echo(peer, request)

    server.service.handle = handle

    def send() -> None:
        dealer.send(a_request(0))
        for number in range(1, 8):
            dealer.send(a_request(number, text="long"))

    busy = threading.Thread(target=while_the_server_is_busy, args=(server, send))
    busy.start()
    read_replies(dealer, {0})
    first_arrived.set()
    busy.join()
    read_replies(dealer, set(range(1, 8)))
    assert in_time == [True] * 7


def test_the_end_of_a_silent_connection_is_not_taken_for_the_end_of_the_next_one(serve, tmp_path):
    """A connection that closes without a message leaves its descriptor to the next one."""
    server = serve(f"ipc://{tmp_path}/s")
    # Made before, so that it opens nothing that could get the descriptor instead.
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(f"{tmp_path}/s")
            time.sleep(0.2)
        time.sleep(0.3)
        dealer.connect(server.endpoint)
        for number in range(3):
            dealer.send(a_request(number))
            dealer.recv()
            time.sleep(0.1)
        assert not server.service.peers_gone


@pytest.mark.parametrize("change", [lambda frame: frame + b"x", lambda frame: frame[:-1]])
def test_a_request_is_alone_and_whole_in_its_frame(bare, change):
    server, dealer = bare
    dealer.send(change(a_request(7)))
    assert isinstance(read_error(dealer, 7), ProtocolError)
    assert server.server.refused == 1 and server.service.started == 0


def test_a_client_of_the_first_protocol_learns_both_versions(bare):
    """Its header was longer, but the fields up to the number are where they were."""
    server, dealer = bare
    dealer.send(struct.pack("<2sHHBBQQId", b"BH", 1, 1, frames.REQUEST, 1, 7, 0, 10_000, time.time()))
    error = read_error(dealer, 7)
    assert isinstance(error, VersionMismatch)
    assert "the client speaks version 1.1" in str(error) and f"the server speaks {frames.PROTOCOL}.1" in str(error)
    assert server.server.refused == 1 and server.service.started == 0


def read_error(dealer: "zmq.Socket[bytes]", number: int) -> BlendHubError:
    frame = memoryview(dealer.recv())
    header = frames.read_header(frame)
    assert header.kind == frames.ERROR and header.number == number
    return decode_error(frames.message(frame))
