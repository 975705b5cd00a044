"""Lets ZeroMQ accept one connection at a time.

ZeroMQ has no limit of connections, and its thread accepts faster than any reader of its monitor could act: a burst
takes every descriptor. So the listening descriptor is set to EPOLLONESHOT in ZeroMQ's epoll: after each connection,
ZeroMQ hears of the next one only when the gate is opened again.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from blendhub_transports.endpoints import Endpoint
from blendhub_transports.sockets import duplicate, is_local_end

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
    """Lets one connection in, and another one each time that it is opened again. Make it when the socket is bound."""

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
