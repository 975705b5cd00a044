"""The contract of a store: chunks and runs beyond this machine's memory, there again after a restart."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import msgspec

from blendhub.contracts.transport import Buffer
from blendhub.plan import Span


class RunKey(msgspec.Struct, frozen=True, array_like=True):
    """Names a run for ever: the namespace's digest and an id that is random, so that no two hubs clash."""

    namespace: str
    run: str


class StoredRun(msgspec.Struct, frozen=True):
    """What a hub needs in order to match a run again: its tokens, and what was exact about it."""

    key: RunKey
    tokens: bytes
    """uint32 little endian, the whole sequence from position 0."""
    description: bytes
    """Opaque to the store; the hub keeps the namespace's description and the exact spans here."""
    chunks: tuple[Span, ...]
    """The positions whose bytes are stored, ascending."""


class Store(ABC):
    """A second tier. All methods block, and may be called from several threads at once.

    *Truth.* ``load`` returns the bytes that ``save`` was given, or nothing. What is torn or corrupted on the
    way is detected, counted in ``corrupted``, dropped, and never served.

    *Durability.* A chunk is catalogued only after its bytes and its run's tokens are complete; a crash at any
    moment leaves each chunk whole or absent.

    *Bounds.* The store keeps within ``capacity`` bytes by itself: it drops what was longest not used, and
    says which, so that the hub stops matching it. A write that fails (a full disk) changes nothing else.
    """

    @abstractmethod
    def save_run(self, run: StoredRun) -> None:
        """Keep a run's tokens and description; replaces an earlier version. ``run.chunks`` is ignored."""

    @abstractmethod
    def save(self, run: RunKey, span: Span, shards: Sequence[Buffer]) -> list[tuple[RunKey, Span]]:
        """Keep the bytes of a chunk, one buffer a rank; returns what was dropped to make room.

        The run must have been saved before. Raises StoreFailed when it cannot be written.
        """

    @abstractmethod
    def load(self, run: RunKey, span: Span, into: Sequence[memoryview]) -> bool:
        """Fill the buffers, one a rank, with a chunk's bytes. False: it is not there or no longer whole;

        what the buffers hold then is undefined. Their sizes must be those that were saved.
        """

    @abstractmethod
    def discard(self, run: RunKey, span: Span) -> None:
        """Forget a chunk, and its run with the last one. Forgetting what is not there is fine."""

    @abstractmethod
    def runs(self) -> Iterator[StoredRun]:
        """Everything stored, as after a restart; damaged entries are dropped and counted, not raised."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held, at most ``capacity``."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The most it will hold."""

    @property
    @abstractmethod
    def corrupted(self) -> int:
        """Entries dropped because they were damaged, since it was opened."""

    @abstractmethod
    def close(self) -> None:
        """Finish writes and let go of the files. Closing twice is fine."""
