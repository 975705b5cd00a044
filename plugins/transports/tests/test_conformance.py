"""The conformance suite of transports, run on those of this distribution."""

import struct
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from blendhub_transports.frames import PROTOCOL
from blendhub_transports.inproc import InprocTransport
from blendhub_transports.keys import make_keys
from blendhub_transports.options import InprocOptions, ZmqOptions
from blendhub_transports.zmq_transport import ZmqTransport

from blendhub.contracts import Codec, Connection, Transport
from blendhub.testing import TransportSuite
from blendhub.testing.transports.answering import AnsweringTests
from blendhub.testing.transports.base import free_port
from blendhub.testing.transports.ending import EndingTests
from blendhub.testing.transports.limits import HostileTests

pytestmark = pytest.mark.slow


class TestInproc(TransportSuite):
    capabilities = ("one_process",)
    max_pending = 600

    def create(self) -> Transport:
        return InprocTransport(InprocOptions(max_pending=600))

    def endpoint(self, path: Path) -> str:
        return f"inproc://{path}"


class ZmqSuite(TransportSuite):
    max_pending = 600

    def create(self) -> Transport:
        return ZmqTransport(ZmqOptions(max_pending=600))

    def send_raw(self, endpoint: str, frames: list[bytes]) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 2000)
            socket.connect(endpoint)
            socket.send_multipart(frames)


class TestZmqUnix(ZmqSuite):
    def endpoint(self, path: Path) -> str:
        return f"ipc://{path}/s"


class TestZmqTcp(ZmqSuite):
    def endpoint(self, path: Path) -> str:
        return f"tcp://127.0.0.1:{free_port()}"


class TestZmqTcpWithKeys(AnsweringTests, EndingTests):
    keys: Path

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _keys(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.keys = tmp_path_factory.mktemp("keys")
        make_keys(cls.keys)

    def create(self) -> Transport:
        folder = self.keys
        both = ZmqOptions(
            max_pending=600,
            secret_key=str(folder / "server.secret"),
            server_key=str(folder / "server.public"),
            client_keys=str(folder / "clients"),
        )
        return _KeyedTransport(both, str(folder / "client.secret"))

    def endpoint(self, path: Path) -> str:
        return f"tcp://127.0.0.1:{free_port()}"


class _KeyedTransport(ZmqTransport):
    """Serves with the server's key and connects with the client's."""

    def __init__(self, options: ZmqOptions, client_secret: str) -> None:
        super().__init__(options)
        self._client = ZmqTransport(msgspec.structs.replace(options, secret_key=client_secret))

    def connect(self, endpoint: str, codec: Codec) -> Connection:
        return self._client.connect(endpoint, codec)


class TestHostileHeaders(HostileTests):
    """Garbage that begins as our frames do."""

    create = ZmqSuite.create
    endpoint = TestZmqUnix.endpoint

    def send_raw(self, endpoint: str, frames: list[bytes]) -> None:
        header = struct.pack("<2sHHBxQId", b"BH", PROTOCOL, 1, len(frames[0]) % 4, 7, 1000, time.time())
        suite: Any = self
        ZmqSuite.send_raw(suite, endpoint, [header + frames[0], *frames[1:]])
