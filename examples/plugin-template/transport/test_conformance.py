"""The suite that ships with BlendHub, run on this transport."""

import socket

from blendhub_transports.options import TransportOptions
from unix_transport import UnixTransport, path_of

from blendhub.testing import TransportSuite


class TestUnixTransport(TransportSuite):
    max_pending = 600

    def create(self) -> UnixTransport:
        return UnixTransport(TransportOptions(max_pending=self.max_pending))

    def send_raw(self, endpoint: str, data: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(path_of(endpoint))
            stranger.sendall(data)
