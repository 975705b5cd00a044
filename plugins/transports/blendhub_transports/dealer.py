"""A client's sockets, from one death of the server to the next."""

import math
import os
import select
import time
import weakref

import msgspec
import zmq

from blendhub.errors import OptionError
from blendhub_transports.endpoints import Endpoint
from blendhub_transports.frames import sending
from blendhub_transports.keys import KeyPair, read_public, read_secret
from blendhub_transports.options import ZmqOptions
from blendhub_transports.pending import Wake
from blendhub_transports.sockets import HANDSHAKE_BROKEN, HANDSHAKE_REFUSED, read_monitor_event, set_limits, watch

AWAKE_S = 0.0002
"""How long a thread that waits lets others run instead of sleeping: a core wakes up later than most answers come."""

LONGEST_WAIT_S = 3600.0
"""Far below what the kernel takes as milliseconds; whoever waits longer waits again."""


class Keys(msgspec.Struct, frozen=True):
    own: KeyPair
    server: bytes


def read_keys(where: Endpoint, options: ZmqOptions) -> Keys | None:
    """The keys that a client needs there; None where none are used."""
    if where.path is not None or (where.private and not options.server_key):
        return None
    if not options.secret_key:
        raise OptionError(
            f"others can reach {where.text}, so it needs keys: have them made where the server runs with "
            "`blendhub keys`, then set the options secret_key and server_key"
        )
    return Keys(read_secret("secret_key", options.secret_key), read_public("server_key", options.server_key))


class Dealer:
    """A DEALER that connects and reconnects by itself, and knows when its server went away.

    Not for several threads at once. What ZeroMQ still held for a server that died would reach its successor:
    so a link that has ended is closed, and another one made.
    """

    def __init__(self, where: Endpoint, options: ZmqOptions, keys: Keys | None, wake: Wake) -> None:
        self._endpoint = where.text
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        set_limits(self.socket, options, where)
        if keys:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
        self._monitor = watch(self.socket)
        self._wake = wake
        # From now on the descriptor tells: ZeroMQ signals only to a reader that has found nothing before.
        self._monitor.getsockopt(zmq.EVENTS)
        self._news = self._monitor.getsockopt(zmq.FD)
        self._told = select.poll()
        self._told.register(self._news, select.POLLIN)
        self._changed = select.poll()
        for descriptor in (self.socket.getsockopt(zmq.FD), self._news, wake.descriptor):
            self._changed.register(descriptor, select.POLLIN)
        self.socket.connect(where.text)
        self.send = sending(self.socket)
        # A connection that is dropped unclosed would let the collector end the context before its sockets: for ever.
        self._end = weakref.finalize(self, _end, self._context, self.socket, self._monitor, os.getpid())

    def ended(self) -> str | None:
        """Why the server cannot answer what it was sent; None while it may."""
        # The descriptor is quicker to ask, and silent as long as there is nothing new.
        if not self._told.poll(0) or not self._monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            return None
        event, value = read_monitor_event(self._monitor, zmq.NOBLOCK)
        if event & HANDSHAKE_REFUSED:
            return f"{self._endpoint} refused this client's key or has another key than expected: see `blendhub keys`"
        if event == HANDSHAKE_BROKEN:
            return f"{self._endpoint} broke off the handshake ({os.strerror(value)})"
        return f"{self._endpoint} died, left, or cut this connection"

    def wait(self, seconds: float) -> bool:
        """Until something may have changed; returns whether there may be news of the server.

        Correct only right after ``socket`` was read until zmq.Again.
        """
        changed = self._changed.poll(0)
        sleep_at = time.monotonic() + min(seconds, AWAKE_S)
        while not changed and time.monotonic() < sleep_at:
            os.sched_yield()
            changed = self._changed.poll(0)
        news = False
        for descriptor, _ in changed or self._changed.poll(math.ceil(min(seconds, LONGEST_WAIT_S) * 1000)):
            if descriptor == self._wake.descriptor:
                self._wake.slept()
            news |= descriptor == self._news
        return news

    def close(self) -> None:
        self._end()


def _end(
    context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]", process: int
) -> None:
    if os.getpid() == process:  # a fork has no part in its parent's sockets
        socket.disable_monitor()
        monitor.close()
        socket.close()
        context.term()
