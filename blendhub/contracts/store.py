"""The contract of a store: chunks and runs beyond this machine's memory, there again after a restart."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import msgspec

from blendhub.contracts.transport import Buffer
from blendhub.plan import Span


class RunKey(msgspec.Struct, frozen=True, array_like=True):
    """Names a run for ever: the namespace's digest and an id that is random, so that no two hubs clash.

    To a store both are text that anyone may have chosen: it must not lead out of the store's own place.
    """

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
    way is detected, counted in ``corrupted``, dropped, and never served. When a run's tokens are damaged,
    its chunks go with it.

    *Durability.* A chunk is catalogued only after its bytes and its run's tokens are complete; a crash at any
    moment leaves each chunk whole or absent. A run none of whose chunks was saved need not outlive the store
    object.

    *Bounds.* The store keeps within ``capacity`` bytes by itself: it drops what was longest not used, and
    says which, so that the hub stops matching it. Saving and loading a chunk are uses. A run goes with the
    last of its chunks; one that has no chunk yet may be dropped like a chunk, and is not reported. The order
    of use survives a restart, at least roughly. A write that fails (a full disk) changes nothing else.

    *Errors.* Bad input raises InvalidInput and changes nothing. StoreFailed says what the store could not
    do, where, and what a person can do about it. A closed store answers everything with StoreFailed.

    *One owner.* A place that another live store object holds is refused with StoreFailed when opened.
    """

    @abstractmethod
    def save_run(self, run: StoredRun) -> list[tuple[RunKey, Span]]:
        """Keep a run's tokens and description; replaces an earlier version. ``run.chunks`` is ignored.

        Returns what was dropped to make room. The tokens must cover the chunks that are stored already.
        """

    @abstractmethod
    def save(self, run: RunKey, span: Span, shards: Sequence[Buffer]) -> list[tuple[RunKey, Span]]:
        """Keep the bytes of a chunk, one buffer a rank; returns what was dropped to make room.

        Replaces an earlier version. The run must have been saved before, with tokens that cover the span,
        which is not empty. Raises StoreFailed when it cannot be written, and when it and its run are larger
        than ``capacity``.
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
        """Every run with a chunk, as after a restart; damaged entries are dropped and counted, not raised.

        The bytes of chunks are not read; ``load`` verifies them. What other threads save or discard
        meanwhile may be seen or not.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held, tokens and descriptions included: at most ``capacity``."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The most it will hold. What is being written comes on top until it is complete."""

    @property
    @abstractmethod
    def corrupted(self) -> int:
        """Entries dropped because they were damaged, since it was opened."""

    @abstractmethod
    def close(self) -> None:
        """Finish writes and let go of the files. Closing twice is fine."""
