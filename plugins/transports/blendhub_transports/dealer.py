"""A client's sockets, for as long as one server lives."""

import math
import os
import select
import weakref

import msgspec
import zmq

from blendhub.core.errors import OptionError
from blendhub_transports.endpoints import Endpoint
from blendhub_transports.keys import KeyPair, read_public, read_secret
from blendhub_transports.options import ZmqOptions
from blendhub_transports.sockets import (
    HANDSHAKE_BROKEN,
    HANDSHAKE_REFUSED,
    open_monitor,
    read_monitor_event,
    readable,
    set_limits,
)

LONGEST_WAIT_S = 3600.0
"""Far below what the kernel takes as milliseconds; a longer wait is made of several."""


class ClientKeys(msgspec.Struct, frozen=True):
    own: KeyPair
    server: bytes


def read_keys(where: Endpoint, options: ZmqOptions) -> ClientKeys | None:
    """The keys that a client needs there; None where none are used."""
    if where.path is not None or (where.private and not options.server_key):
        return None
    if not options.secret_key:
        raise OptionError(
            f"others can reach {where.text}, so it needs keys: run `blendhub keys` where the server runs, "
            "then set the options secret_key and server_key"
        )
    return ClientKeys(read_secret("secret_key", options.secret_key), read_public("server_key", options.server_key))


class Wakeup:
    """A descriptor that becomes readable when any thread calls ``notify``, and stays so until ``reset``."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def notify(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def reset(self) -> None:
        """Only after ``descriptor`` became readable."""
        os.eventfd_read(self.descriptor)

    def __del__(self) -> None:
        os.close(self.descriptor)


class Dealer:
    """A DEALER socket that connects by itself and reports when its server is gone.

    Not for several threads at once. ZeroMQ would deliver what it still holds for a dead server to the successor:
    so a dealer whose server is gone is closed, and a new one made.
    """

    def __init__(self, where: Endpoint, options: ZmqOptions, keys: ClientKeys | None, wakeup: Wakeup) -> None:
        self._endpoint = where.text
        self._has_keys = keys is not None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        set_limits(self.socket, options, where)
        if keys:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
        self._monitor = open_monitor(self.socket)
        self._wakeup = wakeup
        # A descriptor of ZeroMQ signals only after the socket was found empty once.
        readable(self._monitor)
        self._monitor_descriptor = self._monitor.getsockopt(zmq.FD)
        self._poll = select.poll()
        for descriptor in (self.socket.getsockopt(zmq.FD), self._monitor_descriptor, wakeup.descriptor):
            self._poll.register(descriptor, select.POLLIN)
        self.socket.connect(where.text)
        # If a connection is dropped unclosed, the collector could end the context before its sockets, and hang.
        self._end = weakref.finalize(self, _end, self._context, self.socket, self._monitor, os.getpid())

    def why_gone(self) -> str | None:
        """Why the server cannot answer what was sent to it; None as long as it may."""
        if not readable(self._monitor):
            return None
        event, value = read_monitor_event(self._monitor)
        if event & (HANDSHAKE_REFUSED | HANDSHAKE_BROKEN):
            return f"{self._endpoint} {self._why_refused(event, value)}"
        return f"{self._endpoint} died, left, or cut this connection"

    def _why_refused(self, event: int, value: int) -> str:
        if not self._has_keys:
            return (
                "refused the handshake, as a server with keys does if a client has none: set the transport's options "
                "secret_key and server_key; `blendhub keys` and `blendhub serve` print them"
            )
        if event == HANDSHAKE_BROKEN:
            return f"broke off the handshake ({os.strerror(value)}); a server without keys does so"
        return "refused this client's key or has another key than expected: see `blendhub keys`"

    def wait(self, seconds: float) -> bool:
        """Wait until ``socket`` or the wakeup may have changed; returns whether ``why_gone`` may have.

        Correct only right after ``socket`` was read until nothing waited.
        """
        milliseconds = math.ceil(min(seconds, LONGEST_WAIT_S) * 1000)
        ready = {descriptor for descriptor, _ in self._poll.poll(milliseconds)}
        if self._wakeup.descriptor in ready:
            self._wakeup.reset()
        return self._monitor_descriptor in ready

    def close(self) -> None:
        self._end()


def _end(
    context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]", process: int
) -> None:
    if os.getpid() == process:  # a fork must not touch the sockets of its parent
        socket.disable_monitor()
        monitor.close()
        socket.close()
        context.term()
