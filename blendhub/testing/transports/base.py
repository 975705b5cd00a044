"""What all parts of the transport suite share: a service, its messages, and a server that runs in a thread."""

import asyncio
import multiprocessing
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

import msgspec
import pytest

from blendhub.contracts import Codec, Connection, Envelope, Pending, Server, Service, Transport
from blendhub.contracts.transport import Buffer, Peer
from blendhub.core import errors
from blendhub.core.errors import TransportError
from blendhub.framework.host import PluginHost

FORK = multiprocessing.get_context("fork")
MIB = 2**20
LONG = 30.0
"""A timeout that no test should ever use up."""


class EchoRequest(msgspec.Struct, frozen=True, tag=True):
    """``text`` comes back after ``seconds``; ``fail`` names an error to answer with instead."""

    text: str = ""
    seconds: float = 0.0
    fail: str = ""


class EchoReply(msgspec.Struct, frozen=True, tag=True):
    text: str


def client_codec(version: int = 1) -> Codec:
    return Codec(EchoReply, version=version)


class EchoService(Service):
    """Replies with the text and the payload of the request."""

    def __init__(self, version: int = 1) -> None:
        self.codec = Codec(EchoRequest, version=version)
        self.started = 0
        self.peers: list[Peer] = []
        """The peer of each request."""
        self.peers_gone: list[Peer] = []

    def handle(self, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
        self.started += 1
        self.peers.append(peer)
        ask = request.message
        assert isinstance(ask, EchoRequest)
        if ask.fail:
            raise getattr(errors, ask.fail, RuntimeError)(f"asked to fail: {ask.text}")
        reply = Envelope(EchoReply(ask.text), request.payload)
        return asyncio.sleep(ask.seconds, reply) if ask.seconds else reply

    def gone(self, peer: Peer) -> None:
        self.peers_gone.append(peer)


class Running:
    """A server, and the event loop that it runs on in a thread."""

    def __init__(self, transport: Transport, endpoint: str, service: EchoService) -> None:
        self.service = service
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.join = self._thread.join
        try:
            self.server: Server = self.run(transport.serve(endpoint, service))
        except BaseException:
            self._end_loop()
            raise
        self.endpoint = self.server.endpoint

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LONG)

    def stop(self) -> None:
        if not self.loop.is_closed():
            self.run(self.server.close())
            self._end_loop()

    def _end_loop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


Serve: TypeAlias = Callable[..., Running]
Connect: TypeAlias = Callable[..., Connection]


class TransportTests(ABC):
    """Base of the parts of the suite. A subclass's ``create`` makes the transport under test."""

    contract: ClassVar[type] = Transport

    max_pending: ClassVar[int] = 1024
    """Requests of a connection that one server holds before it answers Busy; give the transport that limit in
    ``create``.
    """

    capabilities: ClassVar[tuple[str, ...]] = ()
    """What its ``PluginSpec`` says; see :class:`blendhub.contracts.Transport`."""

    soon_s: ClassVar[float] = 5.0
    """Seconds that count as at once on a busy machine."""

    @abstractmethod
    def create(self) -> Transport:
        """The transport under test."""

    def endpoint(self, path: Path) -> str:
        """An endpoint without a server; ``path`` is a directory that only this test uses."""
        return self.create().private_endpoint(path)

    @classmethod
    def of_installed(cls, host: PluginHost, name: str, options: Mapping[str, Any]) -> type[Self]:
        """The suite of an installed transport; raises if it cannot be created with these options."""
        host.create("transport", name, options)
        attributes = {
            "create": lambda suite: host.create("transport", name, options),
            "max_pending": options.get("max_pending", cls.max_pending),
            "capabilities": host.spec("transport", name).capabilities,
        }
        return type("TestInstalledTransport", (cls,), attributes)

    def send_raw(self, endpoint: str, data: bytes) -> None:
        """Send bytes to a server that no client of this transport would send; override it where that can be done."""
        pytest.skip("this suite does not override send_raw, so it cannot send raw bytes over this transport")

    def until_it_answers(self, connection: Connection) -> None:
        """The connection reaches the server again, or for the first time."""
        started = time.monotonic()
        while True:
            try:
                return check_echo(connection, "back", 1.0)
            except TransportError:
                late = time.monotonic() - started > self.soon_s
                assert not late, "the server is there, but the connection does not reach it"
                time.sleep(0.01)

    @pytest.fixture
    def path(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        # Short, because paths of Unix sockets are.
        return tmp_path_factory.mktemp("t")

    @pytest.fixture
    def serve(self, path: Path) -> Iterator[Serve]:
        """Starts servers that are stopped at the end."""
        with ExitStack() as opened:

            def start(service: EchoService | None = None, endpoint: str | None = None) -> Running:
                server = Running(self.create(), endpoint or self.endpoint(path), service or EchoService())
                opened.callback(server.stop)
                return server

            yield start

    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        """Makes connections that are closed at the end."""
        with ExitStack() as opened:

            def to(endpoint: str, version: int = 1) -> Connection:
                connection: Connection = self.create().connect(endpoint, client_codec(version))
                opened.callback(connection.close)
                return connection

            yield to

    @pytest.fixture
    def server(self, serve: Serve) -> Running:
        return serve()

    @pytest.fixture
    def connection(self, server: Running, connect: Connect) -> Connection:
        return connect(server.endpoint)


def submit(
    connection: Connection, text: str = "", payload: Sequence[Buffer] = (), *, timeout: float = LONG, **about: Any
) -> Pending:
    return connection.submit(Envelope(EchoRequest(text, **about), payload), timeout)


def submit_slow(connection: Connection, timeout: float = LONG) -> Pending:
    """A request that its server answers late."""
    return submit(connection, "slow", seconds=LONG, timeout=timeout)


def check_echo(connection: Connection, text: str, timeout: float = LONG) -> None:
    """Fails unless the server answers with the same text."""
    assert submit(connection, text, timeout=timeout).result().message == EchoReply(text)
