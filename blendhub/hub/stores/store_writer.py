"""Chunks on their way to the store: one batch after another, in one thread, so that a run's tokens are there first.

All state is changed on the event loop; only the store's methods run in the thread. There, too, the tokens are encoded,
when the store asks for them: once for each time that a run grew.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeAlias

import msgspec

from blendhub.contracts import RunKey, SharedStore, Store, StoredRun
from blendhub.core.errors import InvalidInput, StoreAway
from blendhub.core.layout import Namespace
from blendhub.core.provenance import Provenance
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.hub.index.namespace_index import Chunk, Run
from blendhub.hub.limits import MAX_WAITING_SAVES
from blendhub.hub.memory.cache import Cache

Entries: TypeAlias = list[tuple[RunKey, Span]]
TRY_AGAIN_S = 1.0
"""How many seconds to wait, after the store was away, before the next try."""


class RunDescription(msgspec.Struct, frozen=True):
    """The data that the store keeps of a run besides its tokens."""

    namespace: Namespace
    provenance: Provenance


class StoreWriter:
    """The chunks that wait to be saved. They may be evicted before: then they are not saved."""

    def __init__(
        self,
        store: Store,
        cache: Cache,
        saver: ThreadPoolExecutor,
        failed: Callable[[str, Exception], None],
        forget: Callable[[Entries], None],
    ) -> None:
        self.saved = self.skipped = 0
        """Chunks that were saved, and chunks that were evicted, or gave way to later ones, before they were."""
        self.generation = 0
        """The number of the last snapshot of a shared store; see :attr:`Run.listed`."""
        self._store = store
        self._cache = cache
        self._saver = saver
        self._failed = failed
        self._forget = forget
        shared = store if isinstance(store, SharedStore) else None
        self._when_reused = shared is not None and shared.share == "reused"
        self._pace = shared.pace if shared else 0.0
        self.batch: dict[Chunk, Tokens] = {}
        """The chunks that are being saved now, all of one run. They are pinned."""
        self._waiting: OrderedDict[Chunk, Tokens] = OrderedDict()
        """The next chunks, and the tokens of each one's run from position 0 to the chunk's end or beyond."""
        self._saving: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._progress = asyncio.Event()
        """Set when a batch has ended, and then replaced."""

    @property
    def waiting(self) -> int:
        """Chunks that are being saved, or wait for it."""
        return len(self.batch) + len(self._waiting)

    def offer(self, run: Run, tokens: Tokens, chunks: Sequence[Chunk]) -> None:
        """Offer new chunks of a run for saving. ``tokens`` are the run's tokens from position 0."""
        if self._when_reused:
            run.tokens = tokens
        else:
            self._queue(dict.fromkeys(chunks, tokens))

    def reused(self, chunks: Iterable[Chunk]) -> None:
        """Note that a prompt has asked for these chunks again."""
        if self._when_reused:
            self._queue({chunk: chunk.run.tokens for chunk in chunks if chunk.run.tokens is not None})

    def withdraw(self, chunks: Iterable[Chunk]) -> None:
        """Save none of these chunks, but for those that are being saved now."""
        for chunk in chunks:
            self._waiting.pop(chunk, None)

    async def wait_for(self, chunks: Iterable[Chunk], timeout: float) -> None:
        """Wait, for a moment, if any of these chunks is being saved now."""
        if not self.batch.keys().isdisjoint(chunks):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._progress.wait(), timeout)

    async def close(self) -> None:
        """Finish what waits. What a shared store takes slowly on purpose, or cannot take now, is not waited for."""
        self._closing.set()
        if self._saving:
            await asyncio.gather(self._saving, return_exceptions=True)

    def _queue(self, chunks: Mapping[Chunk, Tokens]) -> None:
        self._waiting.update((chunk, tokens) for chunk, tokens in chunks.items() if self._is_to_be_saved(chunk))
        while len(self._waiting) > MAX_WAITING_SAVES:
            self._waiting.popitem(last=False)
            self.skipped += 1
        if self._waiting and self._saving is None:
            self._saving = asyncio.get_running_loop().create_task(self._save_all())

    async def _save_all(self) -> None:
        while self._waiting:
            chunks = self._next_chunks()
            if not chunks:
                continue
            try:
                await self._save(chunks)
                rest_s = self._pace and sum(chunk.slot_bytes for chunk in chunks) / self._pace
            except StoreAway:
                # At the end, since the store may refuse these chunks for ever. What was evicted meanwhile would keep
                # the tokens of its run.
                self._waiting.update(chunks)
                self.withdraw([chunk for chunk in self._waiting if not self._is_to_be_saved(chunk)])
                rest_s = TRY_AGAIN_S
            if rest_s and self._waiting:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), rest_s)
                if self._closing.is_set():
                    break
        self._saving = None

    def _next_chunks(self) -> dict[Chunk, Tokens]:
        """The first waiting chunks that belong to one run, without those that were evicted."""
        run = next(iter(self._waiting)).run
        chunks = {}
        for chunk in list(islice(self._waiting, self._store.at_once)):
            if chunk.run is not run:
                break
            tokens = self._waiting.pop(chunk)
            if self._is_to_be_saved(chunk):
                chunks[chunk] = tokens
            elif not chunk.in_store:
                self.skipped += 1
        return chunks

    def _is_to_be_saved(self, chunk: Chunk) -> bool:
        is_stored = chunk.run.chunks.get(chunk.span.start) is chunk
        return is_stored and chunk.offset is not None and not chunk.in_store

    async def _save(self, chunks: dict[Chunk, Tokens]) -> None:
        """Save chunks of one run. Raises StoreAway; whatever else goes wrong costs these chunks alone."""
        self.batch = chunks
        for chunk in chunks:
            self._cache.pin(chunk)
        run, tokens = next(iter(chunks)).run, max(chunks.values(), key=len)
        try:
            shards = [(chunk.span, self._cache.shards(chunk)) for chunk in chunks]
            loop = asyncio.get_running_loop()
            gone = await loop.run_in_executor(self._saver, self._write, run, tokens, shards)
        except StoreAway as error:
            self._failed("save", error)
            raise
        except Exception as error:
            self._failed("save", error)
        else:
            for chunk in chunks:
                # The store may have dropped it already, for chunks that came after it.
                if (run.key, chunk.span) not in gone:
                    chunk.in_store = True
                    self.saved += 1
                    run.listed = self.generation
            self._forget(gone)
        finally:
            self.batch = {}
            for chunk in chunks:
                self._cache.unpin(chunk)
            self._progress.set()
            self._progress = asyncio.Event()

    def _write(self, run: Run, tokens: Tokens, chunks: list[tuple[Span, list[memoryview]]]) -> Entries:
        try:
            return self._store.save_chunks(run.key, chunks)
        except InvalidInput:  # the store does not have the run, or only a shorter version
            description = msgspec.msgpack.encode(RunDescription(run.index.namespace, run.provenance))
            gone = self._store.save_run(StoredRun(run.key, tokens.tobytes(), description, ()))
            return gone + self._store.save_chunks(run.key, chunks)
