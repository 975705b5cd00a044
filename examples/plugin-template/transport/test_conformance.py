"""The suite that ships with BlendHub, run on this transport."""

import socket
import time

from blendhub_transports import frames
from blendhub_transports.options import TransportOptions
from unix_transport import UnixTransport, joined, path_of

from blendhub.testing import TransportSuite


class TestUnixTransport(TransportSuite):
    max_pending = 600

    def create(self) -> UnixTransport:
        return UnixTransport(TransportOptions(max_pending=self.max_pending))

    def send_raw(self, endpoint: str, data: bytes) -> None:
        """Send the data as they are, with their length before them, or with a header and their length, in turn."""
        request = frames.encode(1, frames.REQUEST, 7, time.monotonic() + 1.0, data)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(path_of(endpoint))
            stranger.sendall([data, joined([data]), joined(request)][len(data) % 3])
