"""What the sockets of both sides have in common: limits, heartbeats, keys, and news of lost peers."""

import struct
import uuid

import zmq

from blendhub_transports.endpoints import Endpoint
from blendhub_transports.options import ZmqOptions

_EVENT = struct.Struct("=Hi")

SILENT_HEARTBEATS = 3

RECONNECT_FIRST_MS = 10
RECONNECT_LONGEST_MS = 200

ACCEPTED = zmq.EVENT_ACCEPTED
DISCONNECTED = zmq.EVENT_DISCONNECTED
HANDSHAKE_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
HANDSHAKE_BROKEN = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def set_limits(socket: "zmq.Socket[bytes]", options: ZmqOptions, endpoint: Endpoint) -> None:
    """Set what both sides agree on, before the socket binds or connects."""
    # Twice the limit: what is somewhat too large gets an answer; only far larger frames cut their sender off.
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * options.max_frame_bytes)
    socket.setsockopt(zmq.RCVHWM, options.high_water_mark)
    socket.setsockopt(zmq.SNDHWM, options.high_water_mark)
    heartbeat_ms = round(options.heartbeat_s * 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, heartbeat_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_HEARTBEATS * heartbeat_ms)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_FIRST_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_LONGEST_MS)
    socket.setsockopt(zmq.IPV6, endpoint.ipv6)
    socket.setsockopt(zmq.LINGER, 0)


def watch(socket: "zmq.Socket[bytes]") -> "zmq.Socket[bytes]":
    """A socket that tells who came, left, or failed to shake hands with ``socket``; see ``read_monitor_event``."""
    address = f"inproc://monitor-{uuid.uuid4()}"
    socket.monitor(address, ACCEPTED | DISCONNECTED | HANDSHAKE_REFUSED | HANDSHAKE_BROKEN)
    monitor = socket.context.socket(zmq.PAIR)
    # ZeroMQ's I/O thread would wait for a reader that is slow to take its news.
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(address)
    return monitor


def read_monitor_event(monitor: "zmq.Socket[bytes]", flags: int) -> tuple[int, int]:
    """The next event and its value, which is a file descriptor or an error; raises zmq.Again if there is none."""
    event, value = _EVENT.unpack(monitor.recv(flags))
    monitor.recv(flags)
    return event, value
