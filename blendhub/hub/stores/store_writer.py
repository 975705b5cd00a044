"""Chunks on their way to the store: one batch after another, in one thread, so that a run's tokens are there first.

All state is changed on the event loop; only the store's methods run in the thread. There, too, the tokens are encoded,
when the store asks for them: once for each time that a run grew.
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeAlias

import msgspec

from blendhub.contracts import RunKey, SharedStore, Store, StoredRun
from blendhub.core.errors import InvalidInput, StoreAway
from blendhub.core.layout import Namespace
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens
from blendhub.hub.index.namespace_index import Chunk, Origin, Run, Saved
from blendhub.hub.limits import MOST_WAITING_SAVES
from blendhub.hub.memory.cache import Cache, slot_bytes

Gone: TypeAlias = list[tuple[RunKey, Span]]
TRY_AGAIN_S = 1.0
"""How many seconds to wait, after the store was away, before the next try."""
OF_ARENA = 4
"""Chunks that wait for a shared store take at most a fourth of the arena: it may be away, and they are not evicted."""


class RunDescription(msgspec.Struct, frozen=True):
    """The data that the store keeps of a run besides its tokens."""

    namespace: Namespace
    exact: bool
    blended: bool = False
    ratio: float = 0.0

    @property
    def origin(self) -> Origin:
        return Origin(self.exact, self.blended, self.ratio)


class StoreWriter:
    """The chunks that wait to be saved; they stay in the arena until then."""

    def __init__(
        self,
        store: Store,
        cache: Cache,
        saver: ThreadPoolExecutor,
        failed: Callable[[str, Exception], None],
        forget: Callable[[Gone], None],
    ) -> None:
        self.saved = self.skipped = 0
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
        self._of_arena = OF_ARENA if shared else 1
        self._to_save: deque[Chunk] = deque()
        """The chunks that wait to be saved. The first ones are being saved."""
        self._bytes = 0
        """The bytes of the arena that the waiting chunks take."""
        self._batch: list[Chunk] = []
        """The chunks that are being saved now."""
        self._of_run: Counter[Run] = Counter()
        """How many of the waiting chunks belong to each run. A run keeps its tokens for them."""
        self._saving: asyncio.Task[None] | None = None
        self._later: deque[Chunk] = deque()
        """What the store was away for, in the order in which it is tried again. It can be evicted: then it is not
        saved."""
        self._trying_again: asyncio.TimerHandle | None = None
        self._closing = False
        self._progress = asyncio.Event()
        """Set when chunks were saved, and then replaced."""

    @property
    def waiting(self) -> int:
        """Chunks that are being saved, or wait for it."""
        return len(self._to_save)

    @property
    def later(self) -> int:
        """Chunks that wait until the store is there again."""
        return len(self._later)

    def offer(self, run: Run, tokens: Tokens, chunks: Sequence[Chunk]) -> None:
        """Offer new chunks of a run for saving. ``tokens`` are the run's tokens from position 0."""
        if self._when_reused:
            run.tokens = tokens
        else:
            self._queue(run, tokens, chunks)

    def reused(self, chunks: Iterable[Chunk]) -> None:
        """Note that a prompt has asked for these chunks again."""
        if self._when_reused:
            for chunk in chunks:
                if chunk.saved is Saved.NO and chunk.run.tokens is not None:
                    self._queue(chunk.run, chunk.run.tokens, [chunk])

    def withdraw(self, chunks: set[Chunk]) -> None:
        """Save none of these chunks, but for those that are being saved now."""
        later = [chunk for chunk in self._to_save if chunk in chunks and chunk not in self._batch]
        if later:
            self._to_save = deque(chunk for chunk in self._to_save if chunk not in chunks or chunk in self._batch)
            for chunk in later:
                self._end(chunk, Saved.NO)

    async def wait_for_progress(self, timeout: float) -> None:
        """Wait until some of the waiting chunks have been saved."""
        if self._to_save:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._progress.wait(), timeout)

    async def close(self) -> None:
        """Finish what waits. What a shared store takes slowly on purpose is not waited for."""
        self._closing = True
        if self._trying_again:
            self._trying_again.cancel()
        if self._saving:
            await asyncio.gather(self._saving, return_exceptions=True)

    def _queue(self, run: Run, tokens: Tokens, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if not self._has_room_for(chunk):
                self.skipped += 1
                continue
            chunk.saved = Saved.WAITING
            self._cache.pin(chunk)
            self._to_save.append(chunk)
            self._bytes += slot_bytes(chunk)
            self._of_run[run] += 1
            run.tokens = tokens
        if self._to_save and self._saving is None:
            self._saving = asyncio.get_running_loop().create_task(self._save_all())

    def _has_room_for(self, chunk: Chunk) -> bool:
        most_bytes = self._cache.arena.extents.size // self._of_arena
        return len(self._to_save) < MOST_WAITING_SAVES and self._bytes + slot_bytes(chunk) <= most_bytes

    async def _save_all(self) -> None:
        while self._to_save:
            batch = self._batch = self._next_batch()
            try:
                kept = await self._save(batch)
            except StoreAway:
                self._put_off()
                break
            finally:
                self._batch = []
            for chunk in batch:
                self._to_save.popleft()
                self._end(chunk, Saved.YES if chunk in kept else Saved.NO)
            self.saved += len(kept)
            self._take_up()
            if kept:
                batch[0].run.listed = self.generation
            self._progress.set()
            self._progress = asyncio.Event()
            if self._pace:
                await self._rest(sum(map(slot_bytes, kept)) / self._pace)
        self._saving = None

    def _put_off(self) -> None:
        """The store is away: what waits for it gives way to other chunks in the arena, and is tried again."""
        while self._to_save:
            chunk = self._to_save.popleft()
            self._of_run[chunk.run] += 1
            self._later.append(chunk)
            self._end(chunk, Saved.NO)
        # Chunks that were evicted meanwhile would keep the tokens of their runs.
        for _ in range(len(self._later)):
            if self._is_left(self._later[0]):
                self._later.rotate(-1)
            else:
                self._end_waiting(queue=False)
        while self._later and (self._closing or len(self._later) > MOST_WAITING_SAVES):
            self.skipped += self._end_waiting(queue=False)
        self._progress.set()
        self._progress = asyncio.Event()
        if self._later and self._trying_again is None:
            self._trying_again = asyncio.get_running_loop().call_later(TRY_AGAIN_S, self._try_again)

    def _try_again(self) -> None:
        self._trying_again = None
        self._take_up()

    def _take_up(self) -> None:
        """Queue more of what was put off: a batch, if so much may wait at a time."""
        n_queued = 0
        while self._later and n_queued < self._store.at_once and self._has_room_for(self._later[0]):
            n_queued += self._end_waiting(queue=True)

    def _end_waiting(self, *, queue: bool) -> bool:
        """The first chunk that was put off waits no longer; returns whether it is still to be saved."""
        chunk = self._later.popleft()
        is_left, tokens = self._is_left(chunk), chunk.run.tokens
        if queue and is_left and tokens is not None:
            self._queue(chunk.run, tokens, [chunk])
        self._release_tokens(chunk.run)
        return is_left

    def _is_left(self, chunk: Chunk) -> bool:
        """Whether a chunk that was put off can still be saved."""
        is_known = chunk.run.chunks.get(chunk.span.start) is chunk
        return is_known and chunk.saved is Saved.NO and chunk.offset is not None and chunk.run.tokens is not None

    async def _rest(self, seconds: float) -> None:
        """Wait, as often as the pace asks for it, unless the hub ends: what waits then is not saved."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not self._closing and loop.time() < until:
            await asyncio.sleep(min(until - loop.time(), 0.1))
        while self._closing and self._to_save:
            self._end(self._to_save.popleft(), Saved.NO)

    def _next_batch(self) -> list[Chunk]:
        """The first waiting chunks that belong to one run."""
        run = self._to_save[0].run
        batch = []
        for chunk in islice(self._to_save, self._store.at_once):
            if chunk.run is not run:
                break
            batch.append(chunk)
        return batch

    def _end(self, chunk: Chunk, saved: Saved) -> None:
        chunk.saved = saved
        self._bytes -= slot_bytes(chunk)
        self._release_tokens(chunk.run)
        self._cache.unpin(chunk)

    def _release_tokens(self, run: Run) -> None:
        """Note that one chunk less needs the tokens of the run."""
        self._of_run[run] -= 1
        if not self._of_run[run]:
            del self._of_run[run]
            if not self._when_reused:
                run.tokens = None

    async def _save(self, batch: list[Chunk]) -> set[Chunk]:
        """The chunks of the batch that the store has afterwards. Raises StoreAway; whatever else goes wrong costs these
        chunks alone.
        """
        run = batch[0].run
        try:
            chunks = [(one.span, self._cache.shards(one)) for one in batch]
            gone = await asyncio.get_running_loop().run_in_executor(self._saver, self._write, run, chunks)
        except StoreAway as error:
            self._failed("save", error)
            raise
        except Exception as error:
            self._failed("save", error)
            return set()
        kept = {chunk for chunk in batch if (run.key, chunk.span) not in gone}
        self._forget(gone)
        return kept

    def _write(self, run: Run, chunks: list[tuple[Span, list[memoryview]]]) -> Gone:
        try:
            return self._store.save_chunks(run.key, chunks)
        except InvalidInput:  # the store does not have the run, or only a shorter version
            assert run.tokens is not None
            about = msgspec.msgpack.encode(RunDescription(run.index.namespace, *run.origin))
            gone = self._store.save_run(StoredRun(run.key, run.tokens.tobytes(), about, ()))
            return gone + self._store.save_chunks(run.key, chunks)
