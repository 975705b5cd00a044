"""Follows what other hubs publish and drop in a shared store.

A thread asks the store, and prepares what came. The event loop applies it in small pieces and has its other work in
between, so that no lookup waits long; the thread asks for more when all is applied.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from blendhub.contracts import Deleted, Dropped, Published, SharedStore, StoredRun
from blendhub.core.errors import BlendHubError, CursorLost
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens, as_tokens
from blendhub.hub.index.namespace_index import NamespaceIndex, Run
from blendhub.hub.index.table import IndexTable
from blendhub.hub.limits import CHUNKS_A_PIECE
from blendhub.hub.stores.store_tier import StoreTier, described
from blendhub.hub.stores.store_writer import RunDescription
from blendhub.system.recurring import RecurringWarnings

log = logging.getLogger(__name__)
WAIT_S = 0.5
"""How long one call waits for changes; closing the hub waits for that call."""
TRY_AGAIN_S = 0.5
AT_ONCE = 8
"""Changes that are prepared and handed to the loop at a time: it has Python's lock until the next ones."""
SLICE_S = 0.0005
"""How long the loop applies changes before it does other work."""


class ForeignRun(NamedTuple):
    """Chunks of another hub, checked."""

    stored: StoredRun
    description: RunDescription
    tokens: Tokens


Change: TypeAlias = ForeignRun | Dropped | Deleted


class Follower:
    """Keeps the hub's index in step with a shared store. Counters are for the loop's thread."""

    def __init__(self, indexes: IndexTable, tier: StoreTier, delete: Callable[[str], Awaitable[object]]) -> None:
        """``delete`` deletes what the requests with a cache salt stored."""
        self.published = self.dropped = self.snapshots = self.failures = self.refused = 0
        """Chunks of others that came and went, snapshots taken, calls that failed, and runs that were not as a hub
        stores them."""
        self.behind = self.hubs = 0
        self.in_step = False
        """Whether the last call of the store was answered."""
        assert isinstance(tier.store, SharedStore)
        self._store = tier.store
        self._warnings = RecurringWarnings(log)
        self._indexes = indexes
        self._tier = tier
        self._slice_began = 0.0
        self._delete = delete
        self._loop: asyncio.AbstractEventLoop
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="blendhub-follow", daemon=True)

    def start(self) -> None:
        """Start the thread. To be called on the loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        self._stopping.set()
        await asyncio.to_thread(self._thread.join)

    def figures(self) -> dict[str, float]:
        """Counters by name, with those of the store."""
        return {
            "published_chunks": self.published,
            "dropped_chunks": self.dropped,
            "snapshots": self.snapshots,
            "failures": self.failures,
            "refused_runs": self.refused,
            **self._store.figures(),
        }

    # The thread.

    def _follow(self) -> None:
        cursor: bytes | None = None
        while not self._stopping.is_set():
            try:
                cursor = self._take_snapshot() if cursor is None else self._take_changes(cursor)
                self.in_step = True
            except CursorLost as error:
                log.warning("the hub reads the whole catalogue of the shared store again: %s", error)
                cursor = None
            except Exception as error:
                self._failed(error)
                self._stopping.wait(TRY_AGAIN_S)

    def _take_snapshot(self) -> bytes:
        runs, cursor = self._store.snapshot()
        self._wait_for(self._begin_snapshot())
        while (batch := list(islice(runs, AT_ONCE))) and not self._stopping.is_set():
            self._wait_for(self._apply([run for stored in batch for run in self._checked(stored)], whole=True))
        if not self._stopping.is_set():
            self._wait_for(self._end_snapshot())
        return cursor

    def _take_changes(self, cursor: bytes) -> bytes:
        answer = self._store.changes(cursor, WAIT_S)
        self.behind, self.hubs = answer.behind, answer.hubs
        changes = iter(answer.changes)
        while batch := list(islice(changes, AT_ONCE)):
            checked: list[Change] = []
            for change in batch:
                checked += self._checked(change.run) if isinstance(change, Published) else [change]
            self._wait_for(self._apply(checked, whole=False))
        return answer.cursor

    def _checked(self, stored: StoredRun) -> list[ForeignRun]:
        try:
            return [ForeignRun(stored, described(stored), as_tokens(stored.tokens))]
        except Exception as error:  # it would come again, and the hub is to follow what comes after
            self._refused(stored, error)
            return []

    def _refused(self, stored: StoredRun, error: Exception) -> None:
        self.refused += 1
        self._warnings.warn(type(error).__name__, f"the hub skips {stored.key} of the shared store: {error}", error)

    def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.in_step:
            text = "the shared store does not answer: %s; the hub goes on alone, and follows again when it does"
            log.warning(text, error, exc_info=not isinstance(error, BlendHubError))
        self.in_step = False
        self.hubs = 0

    # The loop.

    async def _apply(self, changes: Sequence[Change], *, whole: bool) -> None:
        """Apply changes in order. ``whole``: they are of a snapshot, so each has all chunks of its run."""
        self._slice_began = time.perf_counter()
        for change in changes:
            if isinstance(change, Dropped):
                self.dropped += len(change.chunks)
                self._tier.forget((change.run, span) for span in change.chunks)
            elif isinstance(change, Deleted):
                await self._delete(change.salt)
            else:
                try:
                    await self._add(change)
                except Exception as error:  # the matcher that refuses it would refuse it again
                    self._refused(change.stored, error)
                if whole:
                    self._note_listed(change.stored)
            await self._let_others_work()

    async def _add(self, arrival: ForeignRun) -> None:
        stored, namespace = arrival.stored, arrival.description.namespace
        index = self._indexes.get(namespace.digest)
        if index is None:
            index = await asyncio.to_thread(self._indexes.make, namespace)
        new = []
        for span in stored.chunks:
            chunk = index.find(stored.key, span)
            if chunk:
                chunk.in_store = True
            else:
                new.append(span)
        self.published += len(new)
        for piece in _pieces(new):
            # It may have been dropped meanwhile: it was empty.
            index = self._indexes.add(index)
            self._publish(index, arrival, piece)
            await self._let_others_work(index)

    def _publish(self, index: NamespaceIndex, arrival: ForeignRun, spans: list[Span]) -> None:
        """Make chunks that follow each other matchable."""
        stored = arrival.stored
        start = spans[0].start
        run = next((run for run in index.named(stored.key) if run.end == start and run.foreign), None)
        if run is None:
            id, provenance = self._indexes.new_run_id(), arrival.description.provenance
            run = Run(id, index, start, provenance, stored.key, foreign=True)
        run.listed = self._tier.writer.generation
        index.publish(run, arrival.tokens, spans, in_store=True)

    async def _let_others_work(self, index: NamespaceIndex | None = None) -> None:
        if time.perf_counter() - self._slice_began >= SLICE_S:
            await asyncio.sleep(0)
            self._slice_began = time.perf_counter()
        if index and not index.queue.is_idle:
            # A long lookup is under way. What is applied meanwhile would queue before the next lookups.
            is_done = index.queue.ask(lambda: None, 0)
            if is_done:
                await is_done

    # Snapshots: what the store had before, and the snapshot has not, is gone.

    async def _begin_snapshot(self) -> None:
        self.snapshots += 1
        self._tier.writer.generation += 1
        self._tier.reads_snapshot = True

    def _note_listed(self, stored: StoredRun) -> None:
        index = self._indexes.get(stored.key.namespace)
        if index:
            listed = set(stored.chunks)
            for run in list(index.named(stored.key)):
                run.listed = self._tier.writer.generation
                if run.foreign:  # of the hub's own runs, chunks may have been saved since the snapshot looked
                    self._forget_saved(run, listed)

    async def _end_snapshot(self) -> None:
        for index in list(self._indexes):
            for run in list(index.runs.values()):
                if run.listed != self._tier.writer.generation:
                    self._forget_saved(run, set())
                await self._let_others_work()
        self._tier.reads_snapshot = False

    def _forget_saved(self, run: Run, listed: set[Span]) -> None:
        gone = [chunk for chunk in run.chunks.values() if chunk.in_store and chunk.span not in listed]
        self.dropped += len(gone)
        for chunk in gone:
            self._tier.forget_chunk(chunk)


def _pieces(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans that follow each other without a gap, a limited number at a time."""
    pieces: list[list[Span]] = []
    for span in spans:
        if pieces and pieces[-1][-1].end == span.start and len(pieces[-1]) < CHUNKS_A_PIECE:
            pieces[-1].append(span)
        else:
            pieces.append([span])
    return pieces
