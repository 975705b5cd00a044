"""Every wait has a deadline, every queue a limit, and invalid bytes harm no other client."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendhub.contracts import Connection, Envelope
from blendhub.core.errors import Busy, DeadlineExceeded, VersionMismatch
from blendhub.testing.sentences import holds
from blendhub.testing.transports.base import (
    LONG,
    SOON,
    Connect,
    EchoReply,
    EchoRequest,
    EchoService,
    Running,
    Serve,
    TransportTests,
    check_echo,
    submit_slow,
)


@holds("Every request ends by its deadline, with its reply or with a typed error:")
class LimitTests(TransportTests):
    def test_a_request_ends_at_its_deadline(self, connection: Connection) -> None:
        check_echo(connection, "warm")
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            connection.call(Envelope(EchoRequest("slow", seconds=LONG)), 0.3)
        assert 0.25 < time.monotonic() - started < SOON
        check_echo(connection, "still here")

    def test_a_deadline_passes_even_if_no_thread_waits(self, connection: Connection) -> None:
        pending = submit_slow(connection, 0.2)
        time.sleep(0.3)
        assert pending.done()
        with pytest.raises(DeadlineExceeded):
            pending.result()

    def test_a_late_reply_is_dropped(self, connection: Connection) -> None:
        for number in range(5):
            with pytest.raises(DeadlineExceeded):
                connection.call(Envelope(EchoRequest(f"late {number}", seconds=0.15)), 0.1)
        time.sleep(0.2)
        check_echo(connection, "mine")

    @holds("A server holds at most a bounded number of requests; one more is answered")
    def test_one_request_too_many_is_answered_busy_at_once(self, server: Running, connect: Connect) -> None:
        connections = [connect(server.endpoint) for _ in range(2)]
        started = time.monotonic()
        pending = []
        n_busy = 0
        for number in range(self.max_pending + 20):
            try:
                pending.append(submit_slow(connections[number % 2]))
            except Busy:
                n_busy += 1
        while n_busy < 20 and time.monotonic() - started < LONG:
            for one in [one for one in pending if one.done()]:
                pending.remove(one)
                with pytest.raises(Busy):
                    one.result()
                n_busy += 1
        assert n_busy == 20, f"{n_busy} of 20 requests too many were answered Busy"

    @holds("A server holds at most a bounded number of requests; one more is answered")
    def test_after_busy_there_is_room_again(self, server: Running, connect: Connect) -> None:
        connection = connect(server.endpoint)
        for _ in range(self.max_pending + 5):
            try:
                submit_slow(connection, 1.0)
            except Busy:
                break
        deadline = time.monotonic() + LONG
        while True:
            try:
                check_echo(connection, "room", 5.0)
                return
            except (Busy, DeadlineExceeded):
                assert time.monotonic() < deadline
                time.sleep(0.1)

    @holds("VersionMismatch when the two sides' codecs differ")
    def test_versions_that_differ_are_named(self, serve: Serve, connect: Connect) -> None:
        service = EchoService(2)
        endpoint = serve(service).endpoint
        for ours in (1, 3):
            connection = connect(endpoint, version=ours)
            with pytest.raises(VersionMismatch) as raised:
                connection.call(Envelope(EchoRequest("hello")), LONG)
            assert str(ours) in str(raised.value) and "2" in str(raised.value)
        assert service.started == 0


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
