"""Servers of ZeroMQ, which are stopped when a test ends."""

from collections.abc import Iterator

import pytest
from blendhub_transports.options import ZmqOptions
from blendhub_transports.zmq_transport import ZmqTransport

from blendhub.testing.transports.base import EchoService, Running


@pytest.fixture
def serve() -> Iterator:
    running: list[Running] = []

    def start(endpoint: str, options: ZmqOptions | None = None) -> Running:
        running.append(Running(ZmqTransport(options or ZmqOptions()), endpoint, EchoService()))
        return running[-1]

    yield start
    for one in running:
        one.stop()
