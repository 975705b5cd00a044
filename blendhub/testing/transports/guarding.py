"""Who reaches a server, and what neither strangers nor clients that stand still can do to it."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from blendhub.contracts import Connection
from blendhub.core.errors import BlendHubError
from blendhub.testing.sentences import holds
from blendhub.testing.transports.base import (
    FORK,
    LONG,
    MIB,
    Connect,
    Running,
    Serve,
    TransportTests,
    check_echo,
    client_codec,
    submit,
)

UNREAD = 64
"""Replies of a MiB for a client that stands still: more than the kernel keeps for it."""
REPLY_S = 0.5
ACCEPTS, LISTENS = 0x10000, "0A"
"""How the kernel marks sockets of Unix and of TCP that accept connections."""


class GuardingTests(TransportTests):
    @holds("Only processes of this user can reach an endpoint.")
    def test_no_other_user_can_connect(self, path: Path, serve: Serve) -> None:
        """The kernel lets those connect to a socket's file that may write it, and everybody where there is no file."""
        before = _listening()
        serve()
        places = _listening() - before
        assert not [place for place in places if not place.startswith("/")], "processes of all users can connect"
        for file in {*map(Path, places), *path.iterdir()}:
            assert not file.stat().st_mode & 0o077, f"processes of other users can use {file}"

    @pytest.mark.slow
    @holds("A peer that does not read its replies may lose them, and never blocks others.")
    def test_a_client_that_stands_still_blocks_no_other(self, server: Running, connect: Connect) -> None:
        if "one_process" in self.capabilities:
            pytest.skip("client and server are one process, so no client stands still alone")

        def ask() -> None:
            connection = self.create().connect(server.endpoint, client_codec())
            asked = [submit(connection, "", [bytes(MIB)], seconds=REPLY_S, timeout=5.0) for _ in range(n_unread)]
            for pending in asked:
                with suppress(BlendHubError):  # its reply is lost
                    pending.result()
            self.until_it_answers(connection)
            os._exit(0)

        n_unread = min(UNREAD, self.max_pending)
        client, other = FORK.Process(target=ask, daemon=True), connect(server.endpoint)
        client.start()
        assert client.pid
        try:
            while server.service.started < n_unread:
                assert client.is_alive(), "a client cannot ask"
                time.sleep(0.001)
            os.kill(client.pid, signal.SIGSTOP)
            until = time.monotonic() + 3 * REPLY_S
            while time.monotonic() < until:
                check_echo(other, "well served", self.soon_s)
        finally:
            os.kill(client.pid, signal.SIGCONT)
        client.join(LONG)
        assert client.exitcode == 0, "it reads again, but is not served"


@holds("Whatever bytes arrive, the server lives on:")
class HostileTests(TransportTests):
    def test_garbage_does_no_harm_and_is_counted(self, server: Running, connection: Connection) -> None:
        before, chance = server.server.refused, random.Random(0)
        for n_bytes in range(1, 200):
            self.send_raw(server.endpoint, chance.randbytes(n_bytes))
            check_echo(connection, "well behaved", self.soon_s)
        deadline = time.monotonic() + self.soon_s
        while server.server.refused < before + 199 and time.monotonic() < deadline:
            check_echo(connection, "well behaved")
        assert server.server.refused == before + 199


def _listening() -> set[str]:
    """Where this process listens: the files of sockets, and the names and addresses of those without a file."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            own.add(os.readlink(descriptor))
    rows = {table: Path("/proc/net", table).read_text().splitlines()[1:] for table in ("unix", "tcp", "tcp6")}
    unix = [line.split(maxsplit=7) for line in rows["unix"]]
    found = [(row[6], row[7]) for row in unix if len(row) > 7 and int(row[3], 16) & ACCEPTS]
    found += [(row[9], f"TCP {row[1]}") for row in map(str.split, rows["tcp"] + rows["tcp6"]) if row[3] == LISTENS]
    return {place for inode, place in found if f"socket:[{inode}]" in own}
