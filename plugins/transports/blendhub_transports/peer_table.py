"""Who is connected to a ROUTER: gives every connection a name of its own, and notices that it left.

ZeroMQ tells of connections by file descriptor and of messages by routing id, in two queues. A hostile client
may choose its routing id, and a descriptor is used again at once, so neither can name a peer.
"""

import itertools
from collections import Counter

import msgspec

from blendhub.contracts.transport import Peer


class _Guest(msgspec.Struct, frozen=True):
    routing_id: bytes
    peer: Peer


class PeerTable:
    """Bookkeeping only: it is told what ZeroMQ tells, each queue in its own order."""

    def __init__(self) -> None:
        self._guests: dict[bytes, _Guest] = {}
        # None: it has not spoken yet.
        self._by_descriptor: dict[int, _Guest | None] = {}
        self._left_unheard: Counter[int] = Counter()
        self._leaving: list[_Guest] = []
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._by_descriptor)

    @property
    def leaving(self) -> bool:
        """Whether ``drained`` has something to do."""
        return bool(self._leaving or self._left_unheard)

    def peer(self, routing_id: bytes) -> Peer | None:
        """The peer that this routing id stands for; None if it has not spoken before."""
        guest = self._guests.get(routing_id)
        return guest.peer if guest else None

    def accepted(self, descriptor: int) -> None:
        self._by_descriptor[descriptor] = None

    def left(self, descriptor: int) -> None:
        guest = self._by_descriptor.pop(descriptor, None)
        if guest:
            self._leaving.append(guest)
        else:
            self._left_unheard[descriptor] += 1

    def speaks(self, routing_id: bytes, descriptor: int) -> Peer:
        """Name the sender of a first message; all news of connections must have been told before."""
        guest = _Guest(routing_id, next(self._numbers).to_bytes(8, "big"))
        self._guests[routing_id] = guest
        if self._left_unheard[descriptor] or descriptor not in self._by_descriptor:
            # It left before its words were read; the descriptor may be somebody else's by now.
            self._left_unheard[descriptor] -= 1
            self._leaving.append(guest)
            return guest.peer
        if before := self._by_descriptor[descriptor]:
            self._leaving.append(before)
        self._by_descriptor[descriptor] = guest
        return guest.peer

    def drained(self) -> list[Peer]:
        """Every message that was there is read: who left has said its last. Returns those peers, once."""
        leaving, self._leaving = self._leaving, []
        self._left_unheard.clear()
        for guest in leaving:
            if self._guests.get(guest.routing_id) is guest:
                del self._guests[guest.routing_id]
        return [guest.peer for guest in leaving]
