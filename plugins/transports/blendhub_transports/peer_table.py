"""The connections of a ROUTER: names each one, and tracks which have left.

ZeroMQ reports connections by file descriptor in the monitor's queue, and messages by routing id in the router's.
A hostile client may choose its routing id, and the kernel reuses a descriptor at once, so neither can name a peer.
"""

import itertools
import secrets
from collections import Counter

import msgspec

from blendhub.contracts.transport import Peer


class _Connection(msgspec.Struct, frozen=True):
    routing_id: bytes
    peer: Peer


class PeerTable:
    """Bookkeeping only; the caller reports the events of each queue in the order of that queue."""

    def __init__(self) -> None:
        self._by_routing_id: dict[bytes, _Connection] = {}
        # None: connected, but no message was read yet.
        self._by_descriptor: dict[int, _Connection | None] = {}
        # Connections that closed before a message of theirs was read, by descriptor.
        self._left_unnamed: Counter[int] = Counter()
        self._left: list[_Connection] = []
        # A service may have several servers, of which each has a table: no two of them name a peer alike.
        self._server = secrets.token_bytes(8)
        self._numbers = itertools.count(1)

    @property
    def any_left(self) -> bool:
        """Whether ``take_left`` has work to do."""
        return bool(self._left or self._left_unnamed)

    def find(self, routing_id: bytes) -> Peer | None:
        """The peer with this routing id; None before ``add``."""
        connection = self._by_routing_id.get(routing_id)
        return connection.peer if connection else None

    def connected(self, descriptor: int) -> None:
        self._by_descriptor[descriptor] = None

    def disconnected(self, descriptor: int) -> None:
        connection = self._by_descriptor.pop(descriptor, None)
        if connection:
            self._left.append(connection)
        else:
            self._left_unnamed[descriptor] += 1

    def add(self, routing_id: bytes, descriptor: int) -> Peer:
        """Name the sender of a first message. All monitor events so far must have been reported before."""
        connection = _Connection(routing_id, self._server + next(self._numbers).to_bytes(8, "big"))
        self._by_routing_id[routing_id] = connection
        if self._left_unnamed[descriptor] or descriptor not in self._by_descriptor:
            # The sender left before its message was read; another connection may have the descriptor by now.
            self._left_unnamed[descriptor] -= 1
            self._left.append(connection)
            return connection.peer
        if previous := self._by_descriptor[descriptor]:
            self._left.append(previous)
        self._by_descriptor[descriptor] = connection
        return connection.peer

    def take_left(self) -> list[Peer]:
        """The peers that left, each once. Call it when every message is read, so that none of theirs follows."""
        left, self._left = self._left, []
        self._left_unnamed.clear()
        for connection in left:
            if self._by_routing_id.get(connection.routing_id) is connection:
                del self._by_routing_id[connection.routing_id]
        return [connection.peer for connection in left]
