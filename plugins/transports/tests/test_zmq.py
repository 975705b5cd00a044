"""What is particular to ZeroMQ: socket files, keys, and frames that are too much."""

import asyncio
import multiprocessing
import os
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq
from blendhub_transports.keys import make_keys
from blendhub_transports.options import ZmqOptions
from blendhub_transports.zmq_transport import ZmqTransport

from blendhub.contracts import Envelope
from blendhub.core.errors import (
    DeadlineExceeded,
    InvalidInput,
    OptionError,
    ProtocolError,
    TransportError,
)
from blendhub.testing.transports.base import EchoReply, EchoRequest, client_codec, free_port


def ask(
    endpoint: str, options: ZmqOptions | None = None, envelope: Envelope | None = None, timeout: float = 10.0
) -> Envelope:
    connection = ZmqTransport(options or ZmqOptions()).connect(endpoint, client_codec())
    try:
        return connection.call(envelope or Envelope(EchoRequest("hello")), timeout)
    finally:
        connection.close()


def test_a_socket_file_is_private_and_removed_with_its_server(serve, tmp_path):
    server = serve(f"ipc://{tmp_path}/s")
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    assert ask(server.endpoint).message == EchoReply("hello")
    server.stop()
    assert not list(tmp_path.iterdir())


def test_a_dead_servers_file_is_replaced(serve, tmp_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    assert ask(serve(f"ipc://{tmp_path}/s").endpoint).message == EchoReply("hello")


def test_a_file_that_is_not_a_socket_is_not_replaced(serve, tmp_path):
    (tmp_path / "s").write_text("a letter")
    with pytest.raises(InvalidInput, match="not a socket"):
        serve(f"ipc://{tmp_path}/s")
    assert (tmp_path / "s").read_text() == "a letter"


def test_a_missing_directory_is_named_with_the_command_that_makes_it(serve, tmp_path):
    with pytest.raises(InvalidInput, match=f"mkdir -p -m 700 {tmp_path}/none"):
        serve(f"ipc://{tmp_path}/none/s")


def test_a_path_that_is_too_long_says_how_long_it_may_be(serve, tmp_path):
    with pytest.raises(InvalidInput, match="107 bytes"):
        serve(f"ipc://{tmp_path}/{'x' * 108}")


def test_a_deadline_error_says_why_no_server_answers_and_the_server_is_found_later(serve, tmp_path):
    endpoint = f"ipc://{tmp_path}/s"
    connection = ZmqTransport(ZmqOptions()).connect(endpoint, client_codec())
    with pytest.raises(
        DeadlineExceeded, match=f"there is no socket {tmp_path}/s: .* blendhub serve --endpoint {endpoint}"
    ):
        connection.call(Envelope(EchoRequest("hello")), 0.1)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    with pytest.raises(DeadlineExceeded, match=f"no server listens any more at {tmp_path}/s"):
        connection.call(Envelope(EchoRequest("hello")), 0.1)
    serve(endpoint)
    assert connection.call(Envelope(EchoRequest("hello")), 10.0).message == EchoReply("hello")
    connection.close()


def test_a_server_that_listens_but_does_not_answer_is_called_overloaded(tmp_path):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        with pytest.raises(DeadlineExceeded, match="is it overloaded"):
            ask(f"ipc://{tmp_path}/s", timeout=0.1)


def test_port_zero_picks_one(serve):
    server = serve("tcp://127.0.0.1:0")
    assert not server.endpoint.endswith(":0")
    assert ask(server.endpoint).message == EchoReply("hello")


def test_tcp_beyond_loopback_needs_keys_on_both_sides(serve):
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


def test_a_secret_that_others_can_read_is_refused(serve, keys):
    os.chmod(keys / "server.secret", 0o644)
    with pytest.raises(OptionError, match="chmod 600"):
        serve("tcp://0.0.0.0:0", server_options(keys))


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 40])
def test_a_file_that_holds_no_key_is_named(serve, keys, content):
    (keys / "server.secret").write_bytes(content)
    with pytest.raises(OptionError, match="holds no key"):
        serve("tcp://0.0.0.0:0", server_options(keys))


def test_frames_too_large_or_too_many_are_refused_on_both_sides(serve, tmp_path):
    narrow = ZmqOptions(max_frame_bytes=2**12)
    server = serve(f"ipc://{tmp_path}/s", narrow)
    too_large, too_many = Envelope(EchoRequest(), [bytes(5000)]), Envelope(EchoRequest(), [b"a"] * 1025)
    for envelope, option in ((too_large, "max_frame_bytes"), (too_many, "1024 frames")):
        for options in (narrow, ZmqOptions()):
            with pytest.raises(ProtocolError, match=option):
                ask(server.endpoint, options, envelope)
    assert server.service.started == 0 and server.server.refused == 1
    assert ask(server.endpoint, narrow).message == EchoReply("hello")


def test_a_frame_of_hostile_size_disconnects_only_its_sender(serve, tmp_path):
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


@pytest.mark.alone
def test_a_client_that_asks_without_a_pause_delays_neither_the_loop_nor_reports_of_departures(serve, tmp_path):
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


def test_the_service_learns_which_peers_left(serve, tmp_path):
    server = serve(f"ipc://{tmp_path}/s")
    for _ in range(3):
        ask(server.endpoint)
    deadline = time.monotonic() + 10
    while len(server.service.peers_gone) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(set(server.service.peers_gone)) == 3


def test_a_fork_closes_the_connection_though_the_leader_is_a_thread_of_its_parent(serve, tmp_path):
    connection = ZmqTransport(ZmqOptions()).connect(serve(f"ipc://{tmp_path}/s").endpoint, client_codec())
    slow = connection.submit(Envelope(EchoRequest("slow", seconds=1.0)), 30.0)
    leader = threading.Thread(target=slow.result)
    leader.start()
    time.sleep(0.2)
    child = multiprocessing.get_context("fork").Process(target=connection.close, daemon=True)
    child.start()
    child.join(10)
    code = child.exitcode
    child.kill()
    leader.join()
    assert code == 0 and slow.result().message == EchoReply("slow")
    connection.close()
