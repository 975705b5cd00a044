"""The suite that ships with BlendHub: every sentence of the contract, tested on this transport."""

import socket

from unix_transport import UnixOptions, UnixTransport

from blendhub.testing import TransportSuite


class TestUnixTransport(TransportSuite):
    max_pending = 600

    def create(self) -> UnixTransport:
        return UnixTransport(UnixOptions(max_pending=600))

    def send_raw(self, endpoint: str, frames: list[bytes]) -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(endpoint.removeprefix("unix://"))
            stranger.sendall(b"".join(frames) + b"!")
