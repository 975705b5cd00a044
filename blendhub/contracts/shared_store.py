"""The contract of a shared store: its place is used by several hubs, and each follows what the others do there."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from blendhub.contracts.store import RunKey, Store, StoredRun
from blendhub.core.spans import Span

Share: TypeAlias = Literal["all", "reused"]
"""Which chunks a hub hands to a shared store: all, or those that a prompt asks for again."""


class ArenaFile(msgspec.Struct, frozen=True):
    """The file that a hub's arena is: another process may map it by its path."""

    path: str
    slots_at: int
    """Where in the file the first slot lies."""
    size: int
    """Bytes of all slots."""


class Published(msgspec.Struct, frozen=True):
    """Chunks that another object saved. ``run.chunks`` are those chunks, and ``run.tokens`` cover them."""

    run: StoredRun


class Dropped(msgspec.Struct, frozen=True):
    """Chunks that are in the place no longer."""

    run: RunKey
    chunks: tuple[Span, ...]


class Deleted(msgspec.Struct, frozen=True):
    """An object has announced that what all requests with a cache salt stored is deleted."""

    salt: str


class Changes(msgspec.Struct, frozen=True):
    """What happened after a cursor, in order."""

    changes: tuple[Published | Dropped | Deleted, ...]
    cursor: bytes
    """Behind these changes: the next call goes on there."""
    behind: int
    """How many changes, at least, still come after them."""
    hubs: int
    """How many store objects use the place now, this one included."""


class SharedStore(Store):
    """A store whose place other hubs use too. Its spec has the capability ``shared``. What :class:`Store` says holds,
    but for this:

    *One place.* Several objects, of several machines, have the place open. What one saved, each of them loads. Names
    of runs are random, so no two objects write the same run.

    *Hints.* That a chunk is catalogued is a hint: its bytes may be gone. ``load`` then returns False, and the chunk is
    dropped from the catalogue, for all. Where the place does not answer, ``load`` raises StoreFailed instead, within
    seconds, and drops nothing. When a load has ended, in whatever way, nothing writes into its buffers any more.

    *Following.* ``snapshot`` gives what is catalogued, with a cursor; ``changes`` gives what was published and dropped
    after a cursor, in order and without a gap, or raises CursorLost. Applied to the snapshot, the changes give the
    catalogue. A change may be one that the snapshot has seen already, and a chunk that was dropped again need not be
    reported as published. What an object saves and discards itself is not among its changes; what the
    place drops for want of room is, whoever saved what took the room.

    *Deletion.* What one object announces is among the changes of each other one. It drops nothing: the hubs drop what
    they know of it, in their arenas, too. A snapshot says nothing of earlier announcements.

    *Alone.* A place that does not answer delays nobody for long: every call ends within seconds, with StoreFailed. The
    object may be opened before the place is there, and works once it is.

    *Fencing.* An object that the others have taken for dead publishes nothing more until it has joined again. Its next
    call of ``changes`` or ``snapshot`` joins.

    *Bounds*: ``nbytes`` and ``capacity`` are those of the place, as it was last heard of.

    *Arena.* ``attach`` comes before the first chunk moves. The buffers of all later calls lie in the arena.
    """

    @property
    @abstractmethod
    def share(self) -> Share:
        """Which chunks the hub is to hand to it."""

    @property
    @abstractmethod
    def pace(self) -> float:
        """The most bytes of chunks that the hub is to hand to it in a second; 0: as many as there are."""

    @abstractmethod
    def attach(self, file: ArenaFile, memory: memoryview) -> None:
        """Use the hub's arena: ``file`` for other processes, ``memory`` in this one until ``close``.

        The hub may still be reserving the arena, so the store touches only bytes that a call has named.
        """

    @abstractmethod
    def snapshot(self) -> tuple[Iterator[StoredRun], bytes]:
        """Every run with a chunk, and a cursor from before the first of them was read."""

    @abstractmethod
    def changes(self, cursor: bytes, timeout: float) -> Changes:
        """What came after the cursor, in pieces of moderate size; waits up to ``timeout`` for something to come.

        Raises CursorLost if it is not known any more, all that came after the cursor. Only one thread at a time calls
        ``snapshot`` and ``changes``.
        """

    @abstractmethod
    def announce(self, deleted: Deleted) -> None:
        """Tell the other objects of a deletion. Raises StoreFailed where that cannot be done."""

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """Counters by name, such as bytes moved and calls that failed."""
