"""The conformance suite of transports, run on those of this distribution as on a stranger's: through the host."""

import socket
import struct
import time

import pytest
from blendhub_transports import frames

from blendhub import PluginHost
from blendhub.contracts import Transport
from blendhub.testing import TransportSuite
from blendhub.testing.transports.limits import HostileTests

pytestmark = pytest.mark.slow
HOST = PluginHost.discover()
OPTIONS = {"max_pending": 600}


class TestInproc(TransportSuite):
    capabilities = HOST.spec("transport", "inproc").capabilities
    max_pending = 600

    def create(self) -> Transport:
        transport: Transport = HOST.create("transport", "inproc", OPTIONS)
        return transport


class TestUnix(TransportSuite):
    max_pending = 600

    def create(self) -> Transport:
        transport: Transport = HOST.create("transport", "unix", OPTIONS)
        return transport

    def send_raw(self, endpoint: str, data: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(endpoint.removeprefix("ipc://"))
            stranger.sendall(data)


class TestHostileHeaders(HostileTests):
    """Garbage behind the beginning of a frame of ours."""

    create = TestUnix.create

    def send_raw(self, endpoint: str, data: bytes) -> None:
        about = (frames.MAGIC, frames.PROTOCOL, 1, len(data) % 4, len(data) % 3, 7, time.monotonic() + 1.0, len(data))
        TestUnix().send_raw(endpoint, struct.pack("<2sHHBxHQdQ", *about) + data)
