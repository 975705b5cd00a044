"""The suite that ships with BlendHub, run on this transport."""

import socket

from streams_transport import StreamsOptions, StreamsTransport

from blendhub.testing import TransportSuite


class TestStreamsTransport(TransportSuite):
    max_pending = 600

    def create(self) -> StreamsTransport:
        return StreamsTransport(StreamsOptions(max_pending=600))

    def send_raw(self, endpoint: str, data: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(endpoint.removeprefix("streams://"))
            stranger.sendall(data)
