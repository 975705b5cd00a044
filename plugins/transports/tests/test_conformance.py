"""The conformance suite of transports, run on those of this distribution as on a stranger's: through the host."""

import struct
import time

import pytest
import zmq
from blendhub_transports import frames

from blendhub import PluginHost
from blendhub.contracts import Transport
from blendhub.testing import TransportSuite
from blendhub.testing.transports.suite import HostileTests

pytestmark = pytest.mark.slow
HOST = PluginHost.discover()
OPTIONS = {"max_pending": 600}


class TestInproc(TransportSuite):
    capabilities = HOST.spec("transport", "inproc").capabilities
    max_pending = 600

    def create(self) -> Transport:
        transport: Transport = HOST.create("transport", "inproc", OPTIONS)
        return transport


class TestZmq(TransportSuite):
    max_pending = 600

    def create(self) -> Transport:
        transport: Transport = HOST.create("transport", "zmq", OPTIONS)
        return transport

    def send_raw(self, endpoint: str, data: bytes) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 1000)
            stranger.connect(endpoint)
            stranger.send_multipart([data, data[:1]])


class TestHostileHeaders(HostileTests):
    """Garbage behind the beginning of a frame of ours."""

    create = TestZmq.create

    def send_raw(self, endpoint: str, data: bytes) -> None:
        about = (frames.MAGIC, frames.PROTOCOL, 1, len(data) % 4, 7, time.monotonic() + 1.0)
        TestZmq().send_raw(endpoint, struct.pack("<2sHHBxQd", *about) + data)
