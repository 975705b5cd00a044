"""What all parts of the transport suite share: a service, its messages, and a server that runs in a thread."""

import asyncio
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

import msgspec
import pytest

from blendhub.contracts import Codec, Connection, Envelope, Pending, Server, Service, Transport
from blendhub.contracts.transport import Peer
from blendhub.core import errors
from blendhub.framework.host import PluginHost

LONG = 30.0
"""A timeout that no test should ever use up."""

SOON = 5.0
"""Seconds that count as at once on a busy machine."""


class EchoRequest(msgspec.Struct, frozen=True, tag=True):
    """``text`` comes back after ``seconds``; ``fail`` names an error to answer with instead."""

    text: str = ""
    seconds: float = 0.0
    fail: str = ""


class EchoReply(msgspec.Struct, frozen=True, tag=True):
    text: str


def service_codec(version: int = 1) -> Codec:
    return Codec(EchoRequest, version=version)


def client_codec(version: int = 1) -> Codec:
    return Codec(EchoReply, version=version)


class EchoService(Service):
    """Replies with the text and the payload of the request."""

    def __init__(self, version: int = 1) -> None:
        self.codec = service_codec(version)
        self.started = 0
        self.peers_gone: list[Peer] = []

    def handle(self, peer: Peer, request: Envelope) -> Envelope | Awaitable[Envelope]:
        self.started += 1
        ask = request.message
        assert isinstance(ask, EchoRequest)
        if ask.fail:
            raise getattr(errors, ask.fail, RuntimeError)(f"asked to fail: {ask.text}")
        reply = Envelope(EchoReply(ask.text), request.payload)
        return self._later(ask.seconds, reply) if ask.seconds else reply

    def gone(self, peer: Peer) -> None:
        self.peers_gone.append(peer)

    async def _later(self, seconds: float, reply: Envelope) -> Envelope:
        await asyncio.sleep(seconds)
        return reply


class Running:
    """A server, and the event loop that it runs on in a thread."""

    def __init__(self, transport: Transport, endpoint: str, service: Service) -> None:
        self.service = service
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.server: Server | None = None
        try:
            self.server = self.run(transport.serve(endpoint, service))
            self.endpoint = self.server.endpoint
        except BaseException:
            self.stop()
            raise

    def run(self, work: Any) -> Any:
        async def wait() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(wait(), self.loop).result(LONG)

    def stop(self) -> None:
        if self.loop.is_closed():
            return
        if self.server:
            self.run(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


Serve: TypeAlias = Callable[..., Running]
Connect: TypeAlias = Callable[..., Connection]


class TransportTests(ABC):
    """Base of the parts of the suite. A subclass's ``create`` makes the transport under test."""

    contract: ClassVar[type] = Transport

    max_pending: ClassVar[int] = 4096
    """Requests that one server holds before it answers Busy; give the transport that limit in ``create``."""

    capabilities: ClassVar[tuple[str, ...]] = ()
    """What its ``PluginSpec`` says; see :class:`blendhub.contracts.Transport`."""

    @abstractmethod
    def create(self) -> Transport:
        """The transport under test."""

    def endpoint(self, path: Path) -> str:
        """An endpoint without a server; ``path`` is a directory that only this test uses."""
        endpoint = self.create().private_endpoint(path)
        return f"{endpoint.removesuffix(':0')}:{free_port()}" if endpoint.endswith(":0") else endpoint

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

    def send_raw(self, endpoint: str, frames: list[bytes]) -> None:
        """Send bytes to a server that no client of this transport would send; override it where that can be done."""
        pytest.skip("this suite does not override send_raw, so it cannot send raw bytes over this transport")

    @pytest.fixture
    def path(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        # Short, because paths of Unix sockets are.
        return tmp_path_factory.mktemp("t")

    @pytest.fixture
    def serve(self, path: Path) -> Iterator[Serve]:
        """Starts servers that are stopped at the end."""
        running: list[Running] = []

        def start(service: Service | None = None, endpoint: str | None = None) -> Running:
            running.append(Running(self.create(), endpoint or self.endpoint(path), service or EchoService()))
            return running[-1]

        yield start
        for one in running:
            one.stop()

    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        """Makes connections that are closed at the end."""
        made: list[Connection] = []

        def to(endpoint: str, version: int = 1) -> Connection:
            made.append(self.create().connect(endpoint, client_codec(version)))
            return made[-1]

        yield to
        for one in made:
            one.close()

    @pytest.fixture
    def server(self, serve: Serve) -> Running:
        return serve()

    @pytest.fixture
    def connection(self, server: Running, connect: Connect) -> Connection:
        return connect(server.endpoint)


def check_echo(connection: Connection, text: str, timeout: float = LONG) -> None:
    """Fails unless the server answers with the same text."""
    assert connection.call(Envelope(EchoRequest(text)), timeout).message == EchoReply(text)


def submit_slow(connection: Connection, timeout: float = LONG) -> Pending:
    """A request that its server answers late."""
    return connection.submit(Envelope(EchoRequest("slow", seconds=LONG)), timeout)


def free_port() -> int:
    """A TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
