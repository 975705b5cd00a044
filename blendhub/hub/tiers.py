"""The store behind the arena: chunks are saved in the background, and loaded when a prompt repeats them.

All state is changed on the event loop; only the store's methods run in threads. Saves run one after another in one
thread, so that the store has a run's tokens before its chunks. There, too, the tokens are encoded, when the store asks
for them: once for each time that a run grew.
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec

from blendhub.contracts import RunKey, Store, StoredRun
from blendhub.errors import BlendHubError, InvalidInput, StoreFailed
from blendhub.hub.cache import Cache
from blendhub.hub.index import Chunk, NamespaceIndex, Origin, Run, Saved, content_of
from blendhub.hub.index_table import IndexTable
from blendhub.hub.limits import MOST_WAITING_SAVES
from blendhub.hub.notes import Notes
from blendhub.layout import Namespace
from blendhub.plan import Span
from blendhub.tokens import Tokens, as_tokens

log = logging.getLogger(__name__)
T = TypeVar("T")
READERS = 2


class RunDescription(msgspec.Struct, frozen=True):
    """What the store keeps of a run besides its tokens."""

    namespace: Namespace
    exact: bool
    blended: bool = False
    ratio: float = 0.0


class Tier:
    """A store behind the arena."""

    def __init__(self, store: Store, cache: Cache, indexes: IndexTable) -> None:
        self.store = store
        self._cache = cache
        self._indexes = indexes
        self._saver = ThreadPoolExecutor(1, "blendhub-save")
        self._readers = ThreadPoolExecutor(READERS, "blendhub-load")
        self._loading: dict[Chunk, asyncio.Task[None]] = {}
        self._to_save: deque[Chunk] = deque()
        """The first one is being saved."""
        self._waiting: Counter[Run] = Counter()
        """How many of them belong to each run. A run keeps its tokens for them."""
        self._saving: asyncio.Task[None] | None = None
        self._saved = asyncio.Event()
        """Set when a chunk was saved, and then replaced."""
        self.notes = Notes(store, partial(_in, self._saver), self._failed)
        self.saves = self.loads = self.failures = self.skipped = 0

    @property
    def waiting(self) -> int:
        """Chunks that are being saved, or wait for it."""
        return len(self._to_save)

    def restore(self, index_of: Callable[[Namespace], NamespaceIndex], next_id: Callable[[], int]) -> int:
        """Make everything in the store matchable; blocks. Returns the number of chunks."""
        restored = 0
        for stored in self.store.runs():
            try:
                about = msgspec.msgpack.decode(stored.description, type=RunDescription)
                if about.namespace.digest != stored.key.namespace:
                    raise StoreFailed("its description has another namespace than its key")
                _check_chunks(stored, about.namespace)
                restored += self._restore_run(stored, about, index_of(about.namespace), next_id())
            except (msgspec.MsgspecError, BlendHubError) as error:
                log.warning("the hub skips %s of the store: %s", stored.key, error)
        return restored

    def save(self, run: Run, tokens: Tokens, chunks: Sequence[Chunk]) -> None:
        """Write chunks of a run in the background; they stay in the arena until that is done.

        ``tokens`` are the run's, from position 0.
        """
        room = MOST_WAITING_SAVES - len(self._to_save)
        self.skipped += len(chunks[room:])
        for chunk in chunks[:room]:
            chunk.saved = Saved.WAITING
            self._cache.pin(chunk)
            self._to_save.append(chunk)
            self._waiting[run] += 1
            run.tokens = tokens
        if self._to_save and self._saving is None:
            self._saving = asyncio.get_running_loop().create_task(self._save_all())

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
        if self._to_save:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._saved.wait(), timeout)

    def discard(self, chunks: Iterable[Chunk]) -> None:
        """Discard chunks in the background."""
        entries = [(chunk.run.key, chunk.span) for chunk in chunks]
        self._saver.submit(self._quietly, lambda: [self.store.discard(*entry) for entry in entries])

    async def close(self) -> None:
        """Finish what is being saved, and close the store."""
        tasks = [*self._loading.values(), *([self._saving] if self._saving else [])]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.notes.finish()
        self._saver.shutdown()
        self._readers.shutdown()
        self.store.close()

    async def _save_all(self) -> None:
        while self._to_save:
            chunk = self._to_save[0]
            chunk.saved = await self._save(chunk)
            self.notes.write_soon([chunk])
            self._to_save.popleft()
            self._waiting[chunk.run] -= 1
            if not self._waiting[chunk.run]:
                del self._waiting[chunk.run]
                chunk.run.tokens = None
            self._cache.unpin(chunk)
            self._saved.set()
            self._saved = asyncio.Event()
        self._saving = None

    async def _save(self, chunk: Chunk) -> Saved:
        """What the store has of the chunk afterwards. Whatever goes wrong costs this chunk alone."""
        assert chunk.offset is not None
        try:
            self._forget(await _in(self._saver, self._write, chunk, self._shards(chunk, chunk.offset)))
        except Exception as error:
            self._failed("save", error)
            return Saved.NO
        self.saves += 1
        return Saved.YES

    def _write(self, chunk: Chunk, shards: list[memoryview]) -> list[tuple[RunKey, Span]]:
        run = chunk.run
        try:
            return self.store.save(run.key, chunk.span, shards)
        except InvalidInput:  # the store does not have the run, or only a shorter version
            assert run.tokens is not None
            about = msgspec.msgpack.encode(RunDescription(run.index.namespace, *run.origin))
            dropped = self.store.save_run(StoredRun(run.key, run.tokens.tobytes(), about, ()))
            return dropped + self.store.save(run.key, chunk.span, shards)

    def _read(self, chunk: Chunk, shards: list[memoryview]) -> tuple[bool, bytes | None]:
        found = self.store.load(chunk.run.key, chunk.span, shards)
        return found, self.notes.read(chunk) if found else None

    async def _load(self, chunk: Chunk) -> None:
        # The chunk may have been dropped since the load was requested.
        offset = self._cache.begin_filling(chunk) if chunk.saved is Saved.YES else None
        if offset is None:
            return
        found = gone = False
        note: bytes | None = None
        try:
            shards = self._shards(chunk, offset)
            found, note = await _in(self._readers, self._read, chunk, shards)
            gone = not found
        except Exception as error:
            # The store may still have the chunk, so it stays matchable.
            self._failed("load", error)
        finally:
            self._cache.end_filling(chunk, whole=found)
        self.notes.restore(chunk, note)
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
        origin = Origin(about.exact, about.blended, about.ratio)
        run = Run(id, index, stored.chunks[0].start, origin, stored.key)
        chunks = [Chunk(run, span, None, content_of(index.digest, tokens, span)) for span in stored.chunks]
        for chunk in chunks:
            chunk.saved = Saved.YES
        index.publish(run, tokens, chunks)
        return len(chunks)

    def _failed(self, doing: str, error: Exception) -> None:
        self.failures += 1
        expected = isinstance(error, BlendHubError)
        log.warning("the store could not %s a chunk: %s", doing, error, exc_info=not expected)

    def _quietly(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self._failed("discard", error)


def _check_chunks(stored: StoredRun, namespace: Namespace) -> None:
    """Raise unless the run's chunks are as a hub stores them. A store's files may come from anywhere."""
    reached = 0
    for span in stored.chunks:
        if span.start < reached or span.end > len(stored.tokens) // 4 or namespace.layout.chunks_of(span) != [span]:
            raise StoreFailed(f"{span} of its chunks overlaps another, lies behind its tokens, or is not one chunk")
        reached = span.end
    if not stored.chunks:
        raise StoreFailed("it has no chunks")


async def _in(pool: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *arguments))
