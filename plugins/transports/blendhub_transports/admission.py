"""Bounds the connections of a server: by an option, and by the files that this process may open.

ZeroMQ accepts whatever connects, and aborts the process when it has no descriptor left for a connection to a Unix
socket. So connections are closed well before that: those without a request yet, of the client that has most of these,
the oldest first. A client that asks at once gets in, however many connect without asking.
"""

import contextlib
import logging
import resource
import socket
import time
from collections import Counter

from blendhub_transports.endpoints import Endpoint
from blendhub_transports.sockets import duplicate, is_local_end, pid_of_peer

log = logging.getLogger("blendhub.transports")

ENOUGH_FILES = 2**16 - 1
"""The limit of open files that a process gets, where allowed. A higher limit slows programs that close all others."""

MOST_SPARE = 2**11
"""Descriptors that connections leave free for files and other sockets: so many, or half of them."""

LINE_EVERY_S = 30.0


class ConnectionLimit:
    """The caller reports the events of a socket's monitor in their order, and each connection's first request."""

    def __init__(self, where: Endpoint, max_connections: int) -> None:
        """``where`` has the port that was picked."""
        self._where = where
        self._max_connections = max_connections
        self._max_files = raise_file_limit()
        self._ceiling = self._max_files - min(MOST_SPARE, self._max_files // 2)
        self._open: set[int] = set()
        self._silent: dict[int, str] = {}
        """Those that have sent no request, the oldest first, and which client each is of."""
        self._next_line = 0.0
        self._unsaid = 0

    def connected(self, descriptor: int) -> int:
        """Take note of a new connection; where that is one too many, close some. Returns how many were closed."""
        self._open.add(descriptor)
        self._silent.pop(descriptor, None)
        self._silent[descriptor] = _source(descriptor, self._where)
        if descriptor >= self._ceiling:  # the kernel gives out the lowest number that is free
            return self._make_room(f"{self._max_files} open files; raise the hard limit (ulimit -Hn, LimitNOFILE)")
        if len(self._open) > self._max_connections:
            return self._make_room(f"max_connections = {self._max_connections}; raise it if these are your engines")
        return 0

    def has_asked(self, descriptor: int) -> None:
        """The connection's first request was read."""
        self._silent.pop(descriptor, None)

    def disconnected(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        self._silent.pop(descriptor, None)

    def _make_room(self, limit: str) -> int:
        ((heaviest, n_silent),) = Counter(self._silent.values()).most_common(1)
        n_open = len(self._open)
        # Half of them, so that a flood of connections does not cost a look at all of them each time.
        oldest = [one for one, source in self._silent.items() if source == heaviest][: (n_silent + 1) // 2]
        for descriptor in oldest:
            self.disconnected(descriptor)
            # One that has left meanwhile may have given its number to another file.
            if heaviest and _source(descriptor, self._where) == heaviest:
                _shut_down(descriptor)
        self._unsaid += len(oldest)
        if heaviest and time.monotonic() >= self._next_line:
            log.warning(
                "%s: refused %d connections, which sent no request, the last of %s, while %d were open. The limit: %s",
                self._where.text,
                self._unsaid,
                heaviest,
                n_open,
                limit,
            )
            self._next_line, self._unsaid = time.monotonic() + LINE_EVERY_S, 0
        return len(oldest)


def raise_file_limit() -> int:
    """Let this process open as many files as it may, up to ENOUGH_FILES; returns how many it may open."""
    soft, hard = (
        ENOUGH_FILES if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    wanted = min(hard, ENOUGH_FILES)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        except (OSError, ValueError):  # a sandbox may forbid it
            return soft
    return max(soft, wanted)


def _source(descriptor: int, where: Endpoint) -> str:
    """The connected client; empty if the client has left, so that its descriptor is free, or another file's."""
    with contextlib.suppress(OSError), duplicate(descriptor) as connection:
        if is_local_end(connection, where):
            pid = pid_of_peer(descriptor)
            return (
                f"process {pid or 'of another container'}" if where.path else f"address {connection.getpeername()[0]}"
            )
    return ""


def _shut_down(descriptor: int) -> None:
    """End a connection. ZeroMQ notices, and closes it."""
    with contextlib.suppress(OSError), duplicate(descriptor) as connection:
        connection.shutdown(socket.SHUT_RDWR)
