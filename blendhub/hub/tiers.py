"""The second tier: what is stored is written to the store in the background, and fetched when a prompt repeats it.

All state is touched on the event loop; only the store's own calls run in threads. Saves follow each other in one
thread, so that a run's tokens are there before its chunks.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec

from blendhub.contracts import RunKey, Store, StoredRun
from blendhub.errors import BlendHubError, InvalidInput, StoreFailed
from blendhub.hub.cache import Cache
from blendhub.hub.index import Chunk, NamespaceIndex, Run, Saved, content_of
from blendhub.layout import Namespace
from blendhub.plan import Span
from blendhub.tokens import as_tokens

log = logging.getLogger(__name__)
T = TypeVar("T")
READERS = 2


class RunDescription(msgspec.Struct, frozen=True):
    """What the store keeps of a run beside its tokens."""

    namespace: Namespace
    exact: bool


class Tier:
    """A store behind the arena."""

    def __init__(self, store: Store, cache: Cache, indexes: Mapping[str, NamespaceIndex]) -> None:
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
        """Make all that the store holds matchable; blocks. Returns how many chunks that were."""
        restored = 0
        for stored in self.store.runs():
            try:
                about = msgspec.msgpack.decode(stored.description, type=RunDescription)
                if about.namespace.digest != stored.key.namespace:
                    raise StoreFailed("its namespace is not the one that it is filed under")
                index = index_of(about.namespace)
            except (msgspec.MsgspecError, BlendHubError) as error:
                log.warning("%s in the store is not used: %s", stored.key, error)
                continue
            restored += self._restore_run(stored, about, index, next_id())
        return restored

    def save(self, chunk: Chunk) -> None:
        """Write a chunk in the background; it stays in the arena until that is done."""
        chunk.saved = Saved.WAITING
        task = asyncio.get_running_loop().create_task(self._save(chunk))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    def load(self, chunk: Chunk) -> "asyncio.Task[None]":
        """Fetch a chunk in the background; afterwards it is in the arena, or forgotten, or there was no room."""
        task = self._loading.get(chunk)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._load(chunk))
            self._loading[chunk] = task
            task.add_done_callback(lambda _: self._loading.pop(chunk))
        return task

    async def saved_some(self, timeout: float) -> None:
        """Wait until a chunk that waits was saved."""
        if self._saving:
            await asyncio.wait(self._saving, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    def discard(self, run: RunKey, span: Span) -> None:
        """The chunk is of no use any more."""
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
        chunk.pins += 1
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
            chunk.pins -= 1

    def _write(self, run: StoredRun, span: Span, shards: list[memoryview]) -> list[tuple[RunKey, Span]]:
        try:
            return self.store.save(run.key, span, shards)
        except InvalidInput:  # it does not know the run, or not so much of it
            return self.store.save_run(run) + self.store.save(run.key, span, shards)

    async def _load(self, chunk: Chunk) -> None:
        # It may have been dropped since this was asked for.
        offset = self._cache.begin_filling(chunk) if chunk.saved is Saved.YES else None
        if offset is None:
            return
        found = gone = False
        try:
            shards = self._shards(chunk, offset)
            found = await _in(self._readers, self.store.load, chunk.run.key, chunk.span, shards)
            gone = not found
        except BlendHubError as error:
            # It may be there still, and be read the next time.
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
        """The store did without these to make room."""
        for key, span in dropped:
            index = self._indexes.get(key.namespace)
            run = index.by_key.get(key) if index else None
            chunk = run.chunks.get(span.start) if run else None
            if chunk is None or chunk.saved is not Saved.YES:
                continue
            # One that is being fetched just now ends in the arena, or is dropped when it is not found.
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
