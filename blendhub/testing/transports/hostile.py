"""Whatever bytes arrive, the server keeps serving its other clients."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendhub.contracts import Connection, Envelope
from blendhub.testing.sentences import holds
from blendhub.testing.transports.base import LONG, EchoReply, EchoRequest, Running, TransportTests

garbage = st.lists(st.binary(max_size=200), min_size=1, max_size=5)


@holds("Whatever bytes arrive, the server lives on:")
class HostileTests(TransportTests):
    @pytest.mark.slow
    @settings(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(frames=garbage)
    def test_garbage_does_no_harm(self, server: Running, connection: Connection, frames: list[bytes]) -> None:
        for _ in range(5):
            self.send_raw(server.endpoint, frames)
        assert connection.call(Envelope(EchoRequest("well behaved")), LONG).message == EchoReply("well behaved")

    @holds("Frames that were answered with an error or dropped because they are not valid")
    def test_garbage_is_counted(self, server: Running, connection: Connection) -> None:
        assert server.server
        before = server.server.refused
        for number in range(20):
            self.send_raw(server.endpoint, [b"garbage %d" % number])
        deadline = time.monotonic() + LONG
        while server.server.refused < before + 20 and time.monotonic() < deadline:
            connection.call(Envelope(EchoRequest("well behaved")), LONG)
        assert server.server.refused == before + 20
