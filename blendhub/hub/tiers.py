"""The store behind the arena: chunks are saved in the background, and loaded when a prompt repeats them.

All state is changed on the event loop; only the store's methods run in threads. Saves run one after another in one
thread, so that the store has a run's tokens before its chunks.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec

from blendhub.contracts import RunKey, Store, StoredRun
from blendhub.errors import BlendHubError, InvalidInput, StoreFailed
from blendhub.hub.cache import Cache
from blendhub.hub.index import Chunk, NamespaceIndex, Run, Saved, content_of
from blendhub.hub.index_table import IndexTable
from blendhub.layout import Namespace
from blendhub.plan import Span
from blendhub.tokens import as_tokens

log = logging.getLogger(__name__)
T = TypeVar("T")
READERS = 2


class RunDescription(msgspec.Struct, frozen=True):
    """What the store keeps of a run besides its tokens."""

    namespace: Namespace
    exact: bool


class Tier:
    """A store behind the arena."""

    def __init__(self, store: Store, cache: Cache, indexes: IndexTable) -> None:
        self.store = store
        self._cache = cache
        self._indexes = indexes
        self._saver = ThreadPoolExecutor(1, "blendhub-save")
        self._readers = ThreadPoolExecutor(READERS, "blendhub-load")
        self._loading: dict[Chunk, asyncio.Task[None]] = {}
        self._saving: set[asyncio.Task[None]] = set()
        self.saves = self.loads = self.failures = 0

    @property
    def waiting(self) -> int:
        """Chunks that are being saved, or wait for it."""
        return len(self._saving)

    def restore(self, index_of: Callable[[Namespace], NamespaceIndex], next_id: Callable[[], int]) -> int:
        """Make everything in the store matchable; blocks. Returns the number of chunks."""
        restored = 0
        for stored in self.store.runs():
            try:
                about = msgspec.msgpack.decode(stored.description, type=RunDescription)
                if about.namespace.digest != stored.key.namespace:
                    raise StoreFailed("its description has another namespace than its key")
                index = index_of(about.namespace)
            except (msgspec.MsgspecError, BlendHubError) as error:
                log.warning("the hub skips %s of the store: %s", stored.key, error)
                continue
            restored += self._restore_run(stored, about, index, next_id())
        return restored

    def save(self, chunk: Chunk) -> None:
        """Write a chunk in the background; it stays in the arena until that is done."""
        chunk.saved = Saved.WAITING
        self._cache.pin(chunk)
        task = asyncio.get_running_loop().create_task(self._save(chunk))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    def load(self, chunk: Chunk) -> "asyncio.Task[None]":
        """Load a chunk in the background. Afterwards it is in the arena, or dropped, or the arena was full."""
        task = self._loading.get(chunk)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._load(chunk))
            self._loading[chunk] = task
            task.add_done_callback(lambda _: self._loading.pop(chunk))
        return task

    async def wait_for_a_save(self, timeout: float) -> None:
        """Wait until one of the waiting chunks has been saved."""
        if self._saving:
            await asyncio.wait(self._saving, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    def discard(self, run: RunKey, span: Span) -> None:
        """Discard a chunk in the background."""
        self._saver.submit(self._quietly, lambda: self.store.discard(run, span))

    async def close(self) -> None:
        """Finish what is being saved, and close the store."""
        tasks = [*self._saving, *self._loading.values()]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._saver.shutdown()
        self._readers.shutdown()
        self.store.close()

    async def _save(self, chunk: Chunk) -> None:
        run = chunk.run
        assert chunk.offset is not None and run.tokens is not None
        about = RunDescription(run.index.namespace, run.exact)
        whole = StoredRun(run.key, run.tokens.tobytes(), msgspec.msgpack.encode(about), ())
        try:
            dropped = await _in(self._saver, self._write, whole, chunk.span, self._shards(chunk, chunk.offset))
        except BlendHubError as error:
            chunk.saved = Saved.NO
            self._failed("save", error)
        else:
            chunk.saved = Saved.YES
            self.saves += 1
            self._forget(dropped)
        finally:
            self._cache.unpin(chunk)

    def _write(self, run: StoredRun, span: Span, shards: list[memoryview]) -> list[tuple[RunKey, Span]]:
        try:
            return self.store.save(run.key, span, shards)
        except InvalidInput:  # the store does not have the run, or only a shorter version
            return self.store.save_run(run) + self.store.save(run.key, span, shards)

    async def _load(self, chunk: Chunk) -> None:
        # The chunk may have been dropped since the load was requested.
        offset = self._cache.begin_filling(chunk) if chunk.saved is Saved.YES else None
        if offset is None:
            return
        found = gone = False
        try:
            shards = self._shards(chunk, offset)
            found = await _in(self._readers, self.store.load, chunk.run.key, chunk.span, shards)
            gone = not found
        except BlendHubError as error:
            # The store may still have the chunk, so it stays matchable.
            self._failed("load", error)
        finally:
            self._cache.end_filling(chunk, whole=found)
        if found:
            self.loads += 1
        elif gone or chunk.saved is not Saved.YES:
            chunk.run.index.drop(chunk)

    def _shards(self, chunk: Chunk, offset: int) -> list[memoryview]:
        namespace = chunk.run.index.namespace
        size = namespace.layout.shard_bytes
        return [self._cache.arena.slot(offset + rank * size, size) for rank in range(namespace.world_size)]

    def _forget(self, dropped: Iterable[tuple[RunKey, Span]]) -> None:
        """The store dropped these chunks to make room."""
        for key, span in dropped:
            index = self._indexes.get(key.namespace)
            run = index.by_key.get(key) if index else None
            chunk = run.chunks.get(span.start) if run else None
            if chunk is None or chunk.saved is not Saved.YES:
                continue
            # A chunk that is being loaded ends in the arena, or is dropped when the store does not find it.
            if chunk.offset is None and chunk not in self._cache.filling:
                chunk.run.index.drop(chunk)
            chunk.saved = Saved.NO

    def _restore_run(self, stored: StoredRun, about: RunDescription, index: NamespaceIndex, id: int) -> int:
        tokens = as_tokens(stored.tokens)
        run = Run(id, index, stored.chunks[0].start, about.exact, stored.key)
        run.tokens = tokens
        chunks = [Chunk(run, span, None, content_of(index.digest, tokens, span)) for span in stored.chunks]
        for chunk in chunks:
            chunk.saved = Saved.YES
        index.publish(run, tokens, chunks)
        return len(chunks)

    def _failed(self, doing: str, error: BlendHubError) -> None:
        self.failures += 1
        log.warning("the store could not %s a chunk: %s", doing, error)

    def _quietly(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BlendHubError as error:
            self._failed("discard", error)


async def _in(pool: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *arguments))
