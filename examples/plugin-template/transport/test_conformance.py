"""The suite that ships with BlendHub: every sentence of the contract, tested on this transport."""

import asyncio
import socket

import pytest
from unix_transport import Head, UnixOptions, UnixTransport, frame, read_frame

from blendhub.core.errors import ProtocolError
from blendhub.testing import TransportSuite


class TestUnixTransport(TransportSuite):
    max_pending = 600

    def create(self) -> UnixTransport:
        return UnixTransport(UnixOptions(max_pending=600))

    def send_raw(self, endpoint: str, frames: list[bytes]) -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(endpoint.removeprefix("unix://"))
            stranger.sendall(b"".join(frames) + b"!")


@pytest.mark.parametrize("seconds", [-1.0, 2.0**31, float("inf"), float("nan")])
def test_a_frame_whose_request_would_have_no_deadline_is_refused(seconds: float) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(frame(Head(1, 1, b"", seconds=seconds)))
        await read_frame(reader)

    with pytest.raises(ProtocolError, match="seconds to wait"):
        asyncio.run(read())
