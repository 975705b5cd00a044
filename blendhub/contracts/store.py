"""The contract of a store: chunks and runs beyond this machine's memory, there again after a restart."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec

from blendhub.contracts.transport import Buffer
from blendhub.core.spans import Span


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
    """A second tier.

    Callers pass tokens that are whole, spans that are not empty, at least one buffer a chunk, buffers that are flat
    views of bytes, to ``load`` writable ones, and at most ``at_once`` chunks. No store checks these.

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

    *Errors.* What does not fit what is stored raises InvalidInput and changes nothing. StoreFailed says what the
    store could not do, where, and what a person can do about it; StoreAway, that it does not answer now: then a
    save is tried again later. A closed store answers everything with StoreFailed.

    *Threads.* All methods block, and may be called from several threads at once.

    *One owner.* A place that another live store object holds is refused with StoreFailed when opened. Where hubs are
    to use one place together, a plugin implements :class:`blendhub.contracts.SharedStore`.

    The capability ``no_files`` says that chunks are in a database or a service, and not in files that could be damaged
    one by one. The store answers for their bytes all the same.
    """

    at_once: ClassVar[int] = 1
    """The most chunks that callers pass to ``save_chunks`` and ``load_chunks``. A store that is faster with several
    chunks at a time sets it, and implements these two as well."""

    @abstractmethod
    def save_run(self, run: StoredRun) -> list[tuple[RunKey, Span]]:
        """Keep a run's tokens and description; replaces an earlier version. ``run.chunks`` is ignored.

        Returns what was dropped to make room. The tokens must cover the chunks that are stored already.
        """

    @abstractmethod
    def save(self, run: RunKey, span: Span, shards: Sequence[Buffer]) -> list[tuple[RunKey, Span]]:
        """Keep the bytes of a chunk, one buffer a rank, and one more a rank where it ends with a state or a map.
        Returns what was dropped to make room.

        Replaces an earlier version. The run must have been saved before, with tokens that cover the span. Raises
        StoreFailed when it cannot be written, and when it and its run are larger than ``capacity``.
        """

    @abstractmethod
    def load(self, run: RunKey, span: Span, into: Sequence[memoryview]) -> bool:
        """Fill as many buffers as were saved with a chunk's bytes. False: it is not there or no longer whole;
        what the buffers hold then is undefined. Their sizes must be those that were saved.
        """

    def save_chunks(self, run: RunKey, chunks: Sequence[tuple[Span, Sequence[Buffer]]]) -> list[tuple[RunKey, Span]]:
        """``save`` for several chunks of a run. What it returns are the chunks that are not stored afterwards: those
        that were dropped, and those of ``chunks`` for which there was no room.
        """
        return [gone for span, shards in chunks for gone in self.save(run, span, shards)]

    def load_chunks(self, wanted: Sequence[tuple[RunKey, Span, Sequence[memoryview]]]) -> list[bool]:
        """``load`` for several chunks."""
        return [self.load(run, span, into) for run, span, into in wanted]

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
        """Bytes held: at least those of all chunks, and of their runs' tokens and descriptions; at most ``capacity``.

        The bytes of a chunk that was dropped or discarded are not held any more.
        """

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
        """Finish writes and close the files. Closing twice is fine."""
