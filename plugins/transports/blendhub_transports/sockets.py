"""The settings and the reading of ZeroMQ sockets on both sides, and the monitors that report their connections."""

import asyncio
import os
import socket as sockets
import struct
import uuid
from collections.abc import Callable
from pathlib import Path

import zmq

from blendhub_transports.endpoints import Endpoint
from blendhub_transports.options import ZmqOptions

_EVENT = struct.Struct("=Hi")
_CREDENTIALS = struct.Struct("@iII")
"""``struct ucred``: pid, user, group."""

SILENT_HEARTBEATS = 3

HIGH_WATER_MARK = 8192
"""Messages that wait in one direction of one connection. Beyond it a client gets Busy, and one that does not read loses
replies."""

RECONNECT_FIRST_MS = 10
RECONNECT_LONGEST_MS = 200

# Plain numbers, because an operator of an enum costs more than reading a socket's state.
ACCEPTED = int(zmq.EVENT_ACCEPTED)
ACCEPT_FAILED = int(zmq.EVENT_ACCEPT_FAILED)
DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
HANDSHAKE_REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
HANDSHAKE_BROKEN = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


def set_limits(socket: "zmq.Socket[bytes]", options: ZmqOptions, endpoint: Endpoint) -> None:
    """Apply the options that both sides share, before the socket binds or connects."""
    # Twice the limit: a frame somewhat above it is answered with an error; only one far above it ends the connection.
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * options.max_frame_bytes)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    heartbeat_ms = round(options.heartbeat_s * 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, heartbeat_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_HEARTBEATS * heartbeat_ms)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_FIRST_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_LONGEST_MS)
    socket.setsockopt(zmq.IPV6, endpoint.ipv6)
    socket.setsockopt(zmq.LINGER, 0)


def open_monitor(socket: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    """A socket that receives the monitor events of ``socket``: connections, departures, failed handshakes."""
    address = f"inproc://monitor-{uuid.uuid4()}"
    socket.monitor(address, ACCEPTED | ACCEPT_FAILED | DISCONNECTED | HANDSHAKE_REFUSED | HANDSHAKE_BROKEN)
    monitor = socket.context.socket(zmq.PAIR)
    # With a limit, ZeroMQ's I/O thread would wait for a reader that is slow to take its events.
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(address)
    return monitor


def readable(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a message waits at ``socket``."""
    return bool(socket.getsockopt(_EVENTS) & _POLLIN)


def duplicate(descriptor: int) -> sockets.socket:
    """Another descriptor of a connection, which stays its own; raises OSError if this is none of a socket."""
    copy = os.dup(descriptor)
    try:
        return sockets.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def is_local_end(socket: sockets.socket, endpoint: Endpoint) -> bool:
    """Whether a socket listens at an endpoint, which has the actual port, or was accepted there."""
    local = socket.getsockname()
    return local == str(Path(endpoint.path)) if endpoint.path is not None else local[1:2] == (endpoint.port,)


def pid_of_peer(descriptor: int) -> int | None:
    """The process at the other end of a Unix socket; None if it cannot be seen from here, or is on no such socket."""
    try:
        with duplicate(descriptor) as peer:
            if peer.family != sockets.AF_UNIX:
                return None
            pid, _, _ = _CREDENTIALS.unpack(peer.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size))
    except OSError:  # it has left
        return None
    return pid or None


def read_monitor_event(monitor: "zmq.Socket[bytes]") -> tuple[int, int]:
    """The next event and its value, which is a file descriptor or an error; raises zmq.Again if there is none."""
    event, value = _EVENT.unpack(monitor.recv(zmq.NOBLOCK))
    monitor.recv(zmq.NOBLOCK)
    return event, value


BATCH = 64
"""Messages that are read in one turn before other callbacks of the loop run."""


class Receiver:
    """Calls ``read`` for each message that waits at ``socket``, then ``drained`` when none is left.

    It runs on an asyncio loop, without a thread and without the cost of zmq.asyncio. ``read`` takes one message off
    the socket.

    ZeroMQ's descriptor signals a change once, and any use of the socket may consume that signal. So each turn reads
    until no message is left, and code that sends on the socket outside of ``read`` calls ``check`` afterwards.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", read: Callable[[], None], drained: Callable[[], None] = lambda: None
    ) -> None:
        self._socket = socket
        self._read = read
        self._drained = drained
        self._reading = False
        self._scheduled: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._descriptor, self._turn)
        self.schedule()

    def check(self) -> None:
        """Schedule a turn if a message waits."""
        if not self._reading and readable(self._socket):
            self.schedule()

    def schedule(self) -> None:
        """Schedule a turn, even if no message waits."""
        if self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._turn)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        if self._scheduled is not None:
            self._scheduled.cancel()

    def _turn(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        self._reading, finished = True, False
        try:
            finished = self._read_batch()
        finally:
            self._reading = False
            if not finished:
                # The descriptor does not signal the messages that are still there a second time.
                self.schedule()

    def _read_batch(self) -> bool:
        """Read what waits, but no more than a batch; returns whether that was all."""
        for _ in range(BATCH):
            # Asked first, since an exception where nothing waits costs more than reading.
            if not readable(self._socket):
                self._drained()
                return True
            self._read()
        return False
