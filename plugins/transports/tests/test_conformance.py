"""The conformance suite of transports, run on those of this distribution as on a stranger's: through the host."""

import struct
import time

import pytest
import zmq
from blendhub_transports import frames

from blendhub import PluginHost
from blendhub.testing import TransportSuite
from blendhub.testing.transports.guarding import HostileTests

pytestmark = pytest.mark.slow
HOST = PluginHost.discover()
OPTIONS = {"max_pending": 600}


class TestInproc(TransportSuite.of_installed(HOST, "inproc", OPTIONS)):  # type: ignore[misc]
    """It has no bytes that a stranger could send."""


class TestZmq(TransportSuite.of_installed(HOST, "zmq", OPTIONS)):  # type: ignore[misc]
    def send_raw(self, endpoint: str, data: bytes) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 1000)
            stranger.connect(endpoint)
            stranger.send_multipart([data, data[:1]])


class TestHostileHeaders(HostileTests.of_installed(HOST, "zmq", OPTIONS)):  # type: ignore[misc]
    """Garbage behind the beginning of a frame of ours."""

    def send_raw(self, endpoint: str, data: bytes) -> None:
        about = (frames.MAGIC, frames.PROTOCOL, 1, len(data) % 4, 7, time.monotonic() + 1.0)
        TestZmq().send_raw(endpoint, struct.pack("<2sHHBxQd", *about) + data)
