"""The store behind the arena: chunks are saved in the background, and loaded when a prompt repeats them.

All state is changed on the event loop; only the store's methods run in threads.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from blendhub.contracts import RunKey, SharedStore, Store, StoredRun
from blendhub.core.errors import BlendHubError, StoreFailed
from blendhub.core.spans import Span
from blendhub.core.tokens import as_tokens
from blendhub.hub.index.namespace_index import Chunk, Run
from blendhub.hub.index.table import IndexTable
from blendhub.hub.limits import WAIT_FOR_STORE_S
from blendhub.hub.memory.cache import Cache
from blendhub.hub.stores.store_reader import StoreReader
from blendhub.hub.stores.store_writer import RunDescription, StoreWriter
from blendhub.system.recurring import RecurringWarnings

log = logging.getLogger(__name__)
T = TypeVar("T")


class StoreTier:
    """A store behind the arena."""

    def __init__(self, store: Store, cache: Cache, indexes: IndexTable) -> None:
        self.store = store
        self.failures = 0
        self.reads_snapshot = isinstance(store, SharedStore)
        """Whether the hub has yet to hear of some of what a shared store has."""
        self._cache = cache
        self._indexes = indexes
        self._warnings = RecurringWarnings(log)
        self._saver = ThreadPoolExecutor(1, "blendhub-save")
        """The thread that writes, so that a run's tokens are there before its chunks."""
        self.writer = StoreWriter(store, cache, self._saver, self._failed, self.forget)
        self.reader = StoreReader(store, cache, self._failed)

    def restore(self) -> int:
        """Make everything in the store matchable; blocks. Returns the number of chunks."""
        restored = 0
        for stored in self.store.runs():
            try:
                restored += self._restore_run(stored, described(stored))
            except (msgspec.MsgspecError, BlendHubError) as error:
                log.warning("the hub skips %s of the store: %s", stored.key, error)
        return restored

    async def discard(self, chunks: Iterable[Chunk]) -> None:
        """Discard chunks; raises the store's error if it could not discard one of them."""
        entries = [(chunk.run.key, chunk.span) for chunk in chunks]
        if entries:
            await self.in_saver(self._discard, entries)

    async def in_saver(self, work: Callable[[T], None], argument: T) -> None:
        """Call a method of the store behind what is being saved."""
        await asyncio.get_running_loop().run_in_executor(self._saver, work, argument)

    async def stop_moving(self, chunks: Sequence[Chunk]) -> None:
        """Save none of these chunks any more, and wait for those that are being saved or loaded, for a moment."""
        self.writer.withdraw(chunks)
        await self.writer.wait_for(chunks, WAIT_FOR_STORE_S)
        loading = [self.reader.begin(chunk) for chunk in chunks if chunk in self._cache.filling]
        if loading:
            await asyncio.wait(loading, timeout=WAIT_FOR_STORE_S)

    def forget(self, dropped: Iterable[tuple[RunKey, Span]]) -> None:
        """Note that the store no longer has these chunks."""
        for key, span in dropped:
            index = self._indexes.get(key.namespace)
            chunk = index.find(key, span) if index else None
            if chunk and chunk.in_store:
                self.forget_chunk(chunk)

    def forget_chunk(self, chunk: Chunk) -> None:
        """Note that the store no longer has this chunk."""
        # A chunk that is being loaded ends in the arena, or is dropped when the store does not find it.
        if chunk.offset is None and chunk not in self._cache.filling:
            chunk.run.index.drop(chunk)
        chunk.in_store = False

    async def close(self) -> None:
        """Finish what is being saved, and close the store."""
        await asyncio.gather(self.reader.close(), self.writer.close())
        self._saver.shutdown()
        self.store.close()

    def _restore_run(self, stored: StoredRun, description: RunDescription) -> int:
        tokens = as_tokens(stored.tokens)
        index = self._indexes.get(description.namespace.digest) or self._indexes.add(
            self._indexes.make(description.namespace)
        )
        id, start = self._indexes.new_run_id(), stored.chunks[0].start
        run = Run(id, index, start, description.provenance, stored.key)
        index.publish(run, tokens, stored.chunks, in_store=True)
        run.end = len(tokens)
        return len(stored.chunks)

    def _failed(self, doing: str, error: Exception) -> None:
        self.failures += 1
        # The text of one failure names the chunk's file and so differs each time; its cause in the system does not.
        kind = (doing, type(error), getattr(error.__cause__, "errno", None))
        self._warnings.warn(kind, f"the store could not {doing} a chunk: {error}", error)

    def _discard(self, entries: Iterable[tuple[RunKey, Span]]) -> None:
        for entry in entries:
            self.store.discard(*entry)


def described(stored: StoredRun) -> RunDescription:
    """A run's description by a hub. Raises unless its chunks are as a hub stores them: a store's content may come from
    anywhere.
    """
    description = msgspec.msgpack.decode(stored.description, type=RunDescription)
    if description.namespace.digest != stored.key.namespace:
        raise StoreFailed("its description has another namespace than its key")
    description.namespace.check_stored(description.provenance)
    segment = description.provenance.map
    reached, end = (segment.span.start, segment.span.end) if segment else (0, len(stored.tokens) // 4)
    for span in stored.chunks:
        whole = description.namespace.chunks_of(span) == [span]
        if span.start < reached or span.end > min(end, len(stored.tokens) // 4) or not whole:
            raise StoreFailed(f"{span} of its chunks overlaps another, lies behind its tokens, or is not one chunk")
        reached = span.end
    if not stored.chunks:
        raise StoreFailed("it has no chunks")
    return description
