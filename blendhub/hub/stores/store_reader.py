"""Chunks on their way from the store to the arena: several batches at a time, each in a thread.

All state is changed on the event loop; only the store's methods run in the threads.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from blendhub.contracts import RunKey, Store
from blendhub.core.errors import InvalidInput
from blendhub.core.spans import Span
from blendhub.hub.counters import Latencies
from blendhub.hub.index.namespace_index import Chunk
from blendhub.hub.memory.cache import Cache

READERS = 2
Loads: TypeAlias = list[tuple[RunKey, Span, list[memoryview]]]


class StoreReader:
    """The loads that are under way. A chunk that is asked for several times meanwhile is loaded once."""

    def __init__(self, store: Store, cache: Cache, failed: Callable[[str, Exception], None]) -> None:
        self.loaded = 0
        self.reads = Latencies()
        self._store = store
        self._cache = cache
        self._failed = failed
        self._pool = ThreadPoolExecutor(READERS, "blendhub-load")
        self._ends: dict[Chunk, asyncio.Future[None]] = {}
        self._waiting: deque[Chunk] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._n_working = 0

    def begin(self, chunk: Chunk) -> "asyncio.Future[None]":
        """Load a chunk in the background. Afterwards it is in the arena, or dropped, or the arena was full."""
        end = self._ends.get(chunk)
        if end is None:
            loop = asyncio.get_running_loop()
            end = self._ends[chunk] = loop.create_future()
            self._waiting.append(chunk)
            if self._n_working < min(READERS, len(self._waiting)):
                self._n_working += 1
                worker = loop.create_task(self._work())
                self._workers.add(worker)
                worker.add_done_callback(self._workers.discard)
        return end

    async def close(self) -> None:
        """Finish the batches that are under way, and begin no others."""
        while self._waiting:
            self._ends.pop(self._waiting.popleft()).set_result(None)
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._pool.shutdown()

    async def _work(self) -> None:
        while self._waiting:
            batch = self._next_batch()
            try:
                if batch:
                    await self._load(batch)
            finally:
                for chunk in batch:
                    self._ends.pop(chunk).set_result(None)
        self._n_working -= 1

    def _next_batch(self) -> dict[Chunk, list[memoryview]]:
        """The next chunks, with the slots that they go to."""
        batch: dict[Chunk, list[memoryview]] = {}
        while self._waiting and len(batch) < self._store.at_once:
            chunk = self._waiting.popleft()
            # The chunk may have been dropped, or have arrived, since the load was requested.
            is_in_store_only = chunk.in_store and chunk.offset is None
            offset = self._cache.begin_filling(chunk) if is_in_store_only else None
            if offset is None:
                self._ends.pop(chunk).set_result(None)
            else:
                batch[chunk] = self._cache.shards(chunk)
        return batch

    async def _load(self, batch: dict[Chunk, list[memoryview]]) -> None:
        answers: Sequence[bool] = [False] * len(batch)
        answered = False
        began = time.perf_counter()
        try:
            loads = [(chunk.run.key, chunk.span, into) for chunk, into in batch.items()]
            answers = await asyncio.get_running_loop().run_in_executor(self._pool, self._load_each, loads)
            answered = True
        except Exception as error:
            # The store may still have the chunks, so they stay matchable.
            self._failed("load", error)
        finally:
            self.reads.add(time.perf_counter() - began)
            for chunk, whole in zip(batch, answers, strict=True):
                self._cache.end_filling(chunk, whole=whole)
        for chunk, whole in zip(batch, answers, strict=True):
            if whole:
                self.loaded += 1
            elif answered or not chunk.in_store:
                chunk.run.index.drop(chunk)

    def _load_each(self, loads: Loads) -> list[bool]:
        """Whether each chunk is whole. One that the store has in other sizes than its namespace's can never be used:
        it is discarded, and costs none of the others.
        """
        try:
            return self._store.load_chunks(loads)
        except InvalidInput as error:
            if len(loads) > 1:
                return [whole for load in loads for whole in self._load_each([load])]
            self._failed("load", error)
            self._store.discard(*loads[0][:2])
            return [False]
