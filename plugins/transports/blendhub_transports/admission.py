"""Bounds the connections of a server: by an option, and by the files that this process may open.

ZeroMQ accepts whatever connects, and aborts the process when it has no descriptor left for a connection to a Unix
socket. So connections are closed well before that: those without a request yet, of the client that has most of these,
the oldest first. A client that asks at once gets in, however many connect without asking.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import resource
import select
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from blendhub_transports.endpoints import Endpoint
from blendhub_transports.sockets import duplicate, is_local_end, pid_of_peer

log = logging.getLogger("blendhub.transports")

ENOUGH_FILES = 2**16 - 1
"""The limit of open files that a process gets, where allowed. A higher limit slows programs that close all others."""

MOST_SPARE = 2**11
"""Descriptors that connections leave free for files and other sockets; half of all, if that is less."""

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
        """The connections that have sent no request, the oldest first, each with its client."""
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


log = logging.getLogger("blendhub.transports")

FOUND_WITHIN_S = 5.0
"""How long ZeroMQ's thread may take to begin to listen."""

EPOLL_CTL_MOD = 3
FDINFO = Path("/proc/self/fdinfo")

PAUSE_S = 0.001
PAUSES_S = 1.0
"""How long each connection waits, and for how long after one was refused."""

_WATCHED = re.compile(r"tfd:\s*(\d+)\s+events:\s*[0-9a-f]+\s+data:\s*([0-9a-f]+)")


class _Event(ctypes.Structure):
    """``struct epoll_event``. Python's ``select.epoll`` would replace the data, by which ZeroMQ knows the socket."""

    _pack_ = 1 if os.uname().machine == "x86_64" else 0
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


class AcceptGate:
    """Lets one connection in, and another one each time that it is opened again. Make it when the socket is bound.

    ZeroMQ has no limit of connections, and its thread accepts faster than any reader of its monitor could act: a burst
    takes every descriptor. So the listening descriptor is set to EPOLLONESHOT in ZeroMQ's epoll: after each connection,
    ZeroMQ hears of the next one only when the gate is opened again.
    """

    def __init__(self, where: Endpoint) -> None:
        found = None
        with contextlib.suppress(OSError):  # without /proc
            found = _find_listening(where)
        if found is None:
            log.warning("%s: more connections than a limit may be accepted: /proc shows no epoll here", where.text)
        self._epoll, self._listening, data = found or (-1, -1, 0)
        self._event = _Event(select.EPOLLIN | select.EPOLLONESHOT, data)
        self._control = ctypes.CDLL(None).epoll_ctl
        self._loop = asyncio.get_running_loop()
        # At a Unix socket's full queue a client fails at once, while one that uses TCP waits.
        self._may_pause = where.path is None
        self._pause_until = 0.0
        self._open()

    def open_again(self, *, refusing: bool = False) -> None:
        """Let the next connection in: in a moment if some had to be refused, so that a flood does not take a core."""
        now = self._loop.time()
        if refusing and self._may_pause:
            self._pause_until = now + PAUSES_S
        if now < self._pause_until:
            self._loop.call_later(PAUSE_S, self._open)
        else:
            self._open()

    def close(self) -> None:
        """Before the server's socket is closed: its descriptors may be other files' then."""
        self._epoll = -1

    def _open(self) -> None:
        if self._epoll >= 0:
            self._control(self._epoll, EPOLL_CTL_MOD, self._listening, ctypes.byref(self._event))


def _find_listening(where: Endpoint) -> tuple[int, int, int] | None:
    give_up_at = time.monotonic() + FOUND_WITHIN_S
    while (found := next(_listening(where), None)) is None and time.monotonic() < give_up_at:
        time.sleep(0.001)
    return found


def _listening(where: Endpoint) -> Iterator[tuple[int, int, int]]:
    """The descriptor of the epoll that watches the listening socket of this endpoint, the socket's, and its data."""
    for facts in FDINFO.iterdir():
        try:
            watched = _WATCHED.findall(facts.read_text())
        except OSError:  # closed meanwhile
            continue
        for descriptor, data in watched:
            if _listens(int(descriptor), where):
                yield int(facts.name), int(descriptor), int(data, 16)


def _listens(descriptor: int, where: Endpoint) -> bool:
    try:
        with duplicate(descriptor) as watched:
            return bool(watched.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) and is_local_end(watched, where)
    except OSError:  # no socket
        return False
