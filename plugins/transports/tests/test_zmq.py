"""What is particular to ZeroMQ: socket files, keys, and frames that are too much."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from blendhub_transports import frames
from blendhub_transports.error_codec import decode_error
from blendhub_transports.keys import make_keys
from blendhub_transports.options import ZmqOptions
from blendhub_transports.zmq_transport import ZmqTransport

from blendhub.contracts import Envelope
from blendhub.errors import DeadlineExceeded, InvalidInput, OptionError, ProtocolError, TransportError
from blendhub.testing.transports.base import EchoReply, EchoRequest, EchoService, Running, client_codec, free_port


@pytest.fixture
def serve() -> Iterator:
    running: list[Running] = []

    def start(endpoint: str, options: ZmqOptions | None = None) -> Running:
        running.append(Running(ZmqTransport(options or ZmqOptions()), endpoint, EchoService()))
        return running[-1]

    yield start
    for one in running:
        one.stop()


def ask(
    endpoint: str, options: ZmqOptions | None = None, envelope: Envelope | None = None, timeout: float = 10.0
) -> Envelope:
    connection = ZmqTransport(options or ZmqOptions()).connect(endpoint, client_codec())
    try:
        return connection.call(envelope or Envelope(EchoRequest("hello")), timeout)
    finally:
        connection.close()


def test_a_socket_file_is_its_owners_alone_and_goes_with_its_server(serve, tmp_path):
    server = serve(f"ipc://{tmp_path}/s")
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    assert ask(server.endpoint).message == EchoReply("hello")
    server.stop()
    assert not list(tmp_path.iterdir())


def test_a_dead_servers_file_is_replaced(serve, tmp_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    assert ask(serve(f"ipc://{tmp_path}/s").endpoint).message == EchoReply("hello")


def test_what_is_no_socket_is_left_alone(serve, tmp_path):
    (tmp_path / "s").write_text("a letter")
    with pytest.raises(InvalidInput, match="not a socket"):
        serve(f"ipc://{tmp_path}/s")
    assert (tmp_path / "s").read_text() == "a letter"


def test_a_directory_that_is_missing_is_named_with_the_command_that_makes_it(serve, tmp_path):
    with pytest.raises(InvalidInput, match=f"mkdir -p -m 700 {tmp_path}/none"):
        serve(f"ipc://{tmp_path}/none/s")


def test_a_path_that_is_too_long_says_how_long_it_may_be(serve, tmp_path):
    with pytest.raises(InvalidInput, match="107 bytes"):
        serve(f"ipc://{tmp_path}/{'x' * 108}")


def test_who_asks_where_nobody_listens_is_told_what_is_the_matter_and_found_later(serve, tmp_path):
    endpoint = f"ipc://{tmp_path}/s"
    connection = ZmqTransport(ZmqOptions()).connect(endpoint, client_codec())
    with pytest.raises(
        DeadlineExceeded, match=f"there is no socket {tmp_path}/s: .* blendhub serve --endpoint {endpoint}"
    ):
        connection.call(Envelope(EchoRequest("hello")), 0.1)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    with pytest.raises(DeadlineExceeded, match=f"nobody listens any more at {tmp_path}/s"):
        connection.call(Envelope(EchoRequest("hello")), 0.1)
    serve(endpoint)
    assert connection.call(Envelope(EchoRequest("hello")), 10.0).message == EchoReply("hello")
    connection.close()


def test_who_is_heard_by_a_server_that_says_nothing_is_told_so(tmp_path):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        with pytest.raises(DeadlineExceeded, match="is it overloaded"):
            ask(f"ipc://{tmp_path}/s", timeout=0.1)


def test_port_zero_picks_one(serve):
    server = serve("tcp://127.0.0.1:0")
    assert not server.endpoint.endswith(":0")
    assert ask(server.endpoint).message == EchoReply("hello")


def test_tcp_that_others_reach_needs_keys_on_both_sides(serve):
    with pytest.raises(OptionError, match="blendhub keys"):
        serve("tcp://0.0.0.0:0")
    with pytest.raises(OptionError, match="blendhub keys"):
        ask("tcp://192.0.2.1:7070")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def server_options(keys: Path) -> ZmqOptions:
    return ZmqOptions(secret_key=str(keys / "server.secret"), client_keys=str(keys / "clients"))


def client_options(keys: Path) -> ZmqOptions:
    return ZmqOptions(secret_key=str(keys / "client.secret"), server_key=str(keys / "server.public"))


def test_with_keys_listed_clients_get_in_and_others_do_not(serve, keys, tmp_path):
    server = serve(f"tcp://0.0.0.0:{free_port()}", server_options(keys))
    endpoint = server.endpoint.replace("0.0.0.0", "127.0.0.1")
    assert ask(endpoint, client_options(keys)).message == EchoReply("hello")
    make_keys(tmp_path / "stranger")
    stranger = msgspec.structs.replace(client_options(keys), secret_key=str(tmp_path / "stranger" / "client.secret"))
    impostor = msgspec.structs.replace(client_options(keys), server_key=str(tmp_path / "stranger" / "server.public"))
    for options in (stranger, impostor, ZmqOptions()):
        with pytest.raises(TransportError):
            ask(endpoint, options, timeout=1.0)
    assert server.service.started == 1
    assert ask(endpoint, client_options(keys)).message == EchoReply("hello")


def test_keys_are_their_owners_alone_and_never_overwritten(keys):
    assert all(path.stat().st_mode & 0o077 == 0 for path in [keys, *keys.rglob("*")])
    with pytest.raises(InvalidInput, match="never overwritten"):
        make_keys(keys)


def test_a_secret_that_others_can_read_is_refused(serve, keys):
    os.chmod(keys / "server.secret", 0o644)
    with pytest.raises(OptionError, match="chmod 600"):
        serve("tcp://0.0.0.0:0", server_options(keys))


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 40])
def test_a_file_that_holds_no_key_is_named(serve, keys, content):
    (keys / "server.secret").write_bytes(content)
    with pytest.raises(OptionError, match="holds no key"):
        serve("tcp://0.0.0.0:0", server_options(keys))


def test_what_is_too_large_or_too_much_is_refused_on_both_sides(serve, tmp_path):
    narrow = ZmqOptions(max_frame_bytes=2**12, max_payload_frames=2)
    server = serve(f"ipc://{tmp_path}/s", narrow)
    too_large, too_many = Envelope(EchoRequest(), [bytes(5000)]), Envelope(EchoRequest(), [b"a", b"b", b"c"])
    for envelope, option in ((too_large, "max_frame_bytes"), (too_many, "max_payload_frames")):
        for options in (narrow, ZmqOptions()):
            with pytest.raises(ProtocolError, match=option):
                ask(server.endpoint, options, envelope)
    assert server.service.started == 0 and server.server.refused == 2
    assert ask(server.endpoint, narrow).message == EchoReply("hello")


def test_a_frame_of_hostile_size_cuts_off_its_sender_alone(serve, tmp_path):
    server = serve(f"ipc://{tmp_path}/s", ZmqOptions(max_frame_bytes=2**12))
    connection = ZmqTransport(ZmqOptions()).connect(server.endpoint, client_codec())
    connection.call(Envelope(EchoRequest("before")), 10.0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as hostile:
        hostile.setsockopt(zmq.LINGER, 500)
        hostile.connect(server.endpoint)
        hostile.send(bytes(2**20))
        time.sleep(0.3)
    assert connection.call(Envelope(EchoRequest("after")), 10.0).message == EchoReply("after")
    connection.close()


def test_a_reply_is_whole_however_narrow_the_clients_own_limits_are(serve, tmp_path):
    server = serve(f"ipc://{tmp_path}/s")
    server.service.handle = lambda peer, request: Envelope(EchoReply("many"), [b"a", b"b", b"c"])
    assert [bytes(part) for part in ask(server.endpoint, ZmqOptions(max_payload_frames=0)).payload] == [
        b"a",
        b"b",
        b"c",
    ]


def test_who_asks_without_a_pause_holds_up_neither_the_loop_nor_news_of_others(serve, tmp_path):
    server = serve(f"ipc://{tmp_path}/s")
    ended = threading.Event()

    def ask_on() -> None:
        connection = ZmqTransport(ZmqOptions()).connect(server.endpoint, client_codec())
        while not ended.is_set():
            connection.call(Envelope(EchoRequest("again")), 10.0)
        connection.close()

    thread = threading.Thread(target=ask_on)
    thread.start()
    try:
        ask(server.endpoint)
        begun = time.monotonic()
        while not server.service.peers_gone and time.monotonic() < begun + 10:
            server.run(asyncio.sleep(0))
        assert server.service.peers_gone
        begun = time.monotonic()
        for _ in range(50):
            server.run(asyncio.sleep(0))
        assert time.monotonic() - begun < 5
    finally:
        ended.set()
        thread.join()


def test_the_service_hears_of_peers_that_left(serve, tmp_path):
    server = serve(f"ipc://{tmp_path}/s")
    for _ in range(3):
        ask(server.endpoint)
    deadline = time.monotonic() + 10
    while len(server.service.peers_gone) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(set(server.service.peers_gone)) == 3


@pytest.fixture
def bare(serve, tmp_path) -> Iterator[tuple[Running, "zmq.Socket[bytes]"]]:
    """A server, and a socket that talks to it without a client's help."""
    server = serve(f"ipc://{tmp_path}/s")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.connect(server.endpoint)
        yield server, dealer


def a_request(number: int, *, patient: bool, text: str = "hello") -> bytes:
    message = client_codec().encode(EchoRequest(text))
    return frames.request(1, number, message, 10_000, time.time(), patient=patient)


def frames_until(dealer: "zmq.Socket[bytes]", numbers: set[int]) -> list[bytes]:
    """What came until all of these requests were answered, each once."""
    received, missing = [], set(numbers)
    while missing:
        received.append(dealer.recv())
        for header, message in frames.each_message(memoryview(received[-1])):
            assert header.kind == frames.REPLY and client_codec().decode(message).text
            missing.remove(header.number)
    return received


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


def ask_while_the_server_is_busy(server: Running, dealer: "zmq.Socket[bytes]", requests: list[bytes]) -> None:
    def send() -> None:
        for request in requests:
            dealer.send(request)

    while_the_server_is_busy(server, send)


def test_answers_that_may_wait_for_each_other_travel_together(bare):
    server, dealer = bare
    numbers = set(range(60))
    ask_while_the_server_is_busy(server, dealer, [a_request(number, patient=True) for number in numbers])
    assert len(frames_until(dealer, numbers)) < 20


def test_what_travels_together_is_no_more_than_any_client_takes(bare):
    server, dealer = bare
    numbers = set(range(60))
    ask_while_the_server_is_busy(
        server, dealer, [a_request(number, patient=True, text="x" * 1500) for number in numbers]
    )
    received = frames_until(dealer, numbers)
    assert len(received) >= 30 and max(map(len, received)) <= 2**12


def test_an_answer_that_somebody_waits_for_travels_at_once_and_alone(bare):
    server, dealer = bare
    numbers = set(range(60))
    ask_while_the_server_is_busy(server, dealer, [a_request(number, patient=False) for number in numbers])
    assert len(frames_until(dealer, numbers)) == 60


def test_an_answer_does_not_wait_for_work_that_takes_long(bare):
    server, dealer = bare
    numbers = set(range(8))
    echo = server.service.handle

    def slowly(peer, request):
        time.sleep(0.05)
        return echo(peer, request)

    server.service.handle = slowly
    ask_while_the_server_is_busy(server, dealer, [a_request(number, patient=True) for number in numbers])
    assert len(frames_until(dealer, numbers)) == 8


def test_an_answer_that_waits_does_not_wait_for_other_clients_work(bare):
    """Behind three answers that may wait come twenty requests of somebody else, each of which takes long."""
    server, dealer = bare
    echo = server.service.handle

    def slowly(peer, request):
        time.sleep(0.02 if request.message.text == "long" else 0)
        return echo(peer, request)

    server.service.handle = slowly
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:
        other.setsockopt(zmq.LINGER, 0)
        other.connect(server.endpoint)
        for one in (dealer, other):
            one.send(a_request(99, patient=False))
            one.recv()

        def send() -> None:
            for number in range(3):
                dealer.send(a_request(number, patient=True))
            time.sleep(0.01)
            for number in range(20):
                other.send(a_request(number, patient=False, text="long" if number > 2 else "hello"))

        while_the_server_is_busy(server, send)
        begun = time.monotonic()
        frames_until(dealer, set(range(3)))
        assert time.monotonic() - begun < 0.2


def test_who_only_looked_in_does_not_take_the_next_one_with_it(serve, tmp_path):
    """A connection that ends without a word leaves its descriptor to the next one."""
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
            dealer.send(a_request(number, patient=False))
            dealer.recv()
            time.sleep(0.1)
        assert not server.service.peers_gone


@pytest.mark.parametrize("change", [lambda frame: frame + b"x", lambda frame: frame[:-1]])
def test_a_request_is_alone_and_whole_in_its_frame(bare, change):
    server, dealer = bare
    dealer.send(change(a_request(7, patient=False)))
    ((header, message),) = frames.each_message(memoryview(dealer.recv()))
    assert header.kind == frames.ERROR and header.number == 7
    assert isinstance(decode_error(message), ProtocolError)
    assert server.server.refused == 1 and server.service.started == 0
