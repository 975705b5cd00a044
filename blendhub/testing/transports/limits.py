"""Every wait has a deadline, every queue a limit, and invalid bytes harm no other client."""

import time

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from blendhub.contracts import Connection
from blendhub.core.errors import Busy, DeadlineExceeded, VersionMismatch
from blendhub.testing.sentences import holds
from blendhub.testing.transports.base import (
    LONG,
    SOON,
    Connect,
    EchoService,
    Running,
    Serve,
    TransportTests,
    check_echo,
    submit,
    submit_slow,
)


@holds("Every request ends by its deadline, with its reply or with a typed error:")
class LimitTests(TransportTests):
    def test_a_request_ends_at_its_deadline_even_if_no_thread_waits(self, connection: Connection) -> None:
        check_echo(connection, "warm")
        started = time.monotonic()
        waited_for, left_alone = (submit_slow(connection, 0.3) for _ in range(2))
        with pytest.raises(DeadlineExceeded):
            waited_for.result()
        assert 0.25 < time.monotonic() - started < SOON
        assert left_alone.done(0.1)
        with pytest.raises(DeadlineExceeded):
            left_alone.result()
        check_echo(connection, "still here")

    def test_a_late_reply_is_dropped(self, connection: Connection) -> None:
        for number in range(5):
            with pytest.raises(DeadlineExceeded):
                submit(connection, f"late {number}", seconds=0.15, timeout=0.1).result()
        time.sleep(0.2)
        check_echo(connection, "mine")

    @holds("A server holds at most a bounded number of requests of a connection; one more")
    def test_one_request_too_many_is_answered_busy_at_once_and_later_there_is_room(
        self, server: Running, connect: Connect
    ) -> None:
        connection, other = (connect(server.endpoint) for _ in range(2))
        pending, n_busy, started = [], 0, time.monotonic()
        for _ in range(self.max_pending + 20):
            try:
                pending.append(submit_slow(connection, 3.0))
            except Busy:
                n_busy += 1
        for request in pending[self.max_pending :]:
            with pytest.raises(Busy):
                request.result()
            n_busy += 1
        assert n_busy >= 20 and time.monotonic() - started < SOON
        while server.service.started < self.max_pending and time.monotonic() - started < SOON:
            time.sleep(0.01)
        check_echo(other, "the bound is each connection's")
        with pytest.raises(DeadlineExceeded):
            pending[0].result()
        until = time.monotonic() + LONG
        while True:
            try:
                return check_echo(connection, "room")
            except Busy:
                assert time.monotonic() < until
                time.sleep(0.1)

    @holds("VersionMismatch when the two sides' codecs differ")
    def test_versions_that_differ_are_named(self, serve: Serve, connect: Connect) -> None:
        service = EchoService(2)
        endpoint = serve(service).endpoint
        for ours in (1, 3):
            connection = connect(endpoint, version=ours)
            with pytest.raises(VersionMismatch) as raised:
                submit(connection, "hello").result()
            assert str(ours) in str(raised.value) and "2" in str(raised.value)
        assert service.started == 0


@holds("Whatever bytes arrive, the server lives on:")
class HostileTests(TransportTests):
    @pytest.mark.slow
    @settings(
        max_examples=200, phases=[Phase.generate], deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(data=st.binary(min_size=1, max_size=300))
    def test_garbage_does_no_harm(self, server: Running, connection: Connection, data: bytes) -> None:
        for _ in range(5):
            self.send_raw(server.endpoint, data)
        check_echo(connection, "well behaved")

    @holds("Frames that were answered with an error or dropped because they are not valid")
    def test_garbage_is_counted(self, server: Running, connection: Connection) -> None:
        before = server.server.refused
        for number in range(20):
            self.send_raw(server.endpoint, b"garbage %d" % number)
        deadline = time.monotonic() + SOON
        while server.server.refused < before + 20 and time.monotonic() < deadline:
            check_echo(connection, "well behaved")
        assert server.server.refused == before + 20
