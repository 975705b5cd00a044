"""Deletes what a request, or all requests with a cache salt, stored: from the index, the arena and the store."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from blendhub.contracts import Deleted, SharedStore
from blendhub.core.errors import Busy, InvalidInput
from blendhub.core.spans import Span
from blendhub.hub.index.namespace_index import Chunk, Run, Saved
from blendhub.hub.limits import AT_ONCE, DELETIONS_A_SECOND, MOST_WAITING_DELETIONS
from blendhub.hub.state import HubState
from blendhub.hub.stores.store_tier import StoreTier

MOST_ROUNDS = 8
"""How often a deletion looks for more: what was being saved or loaded is deleted in the round after."""


class Deletion:
    """Deletes one request or salt after the other. A deletion that failed or was cut off is asked for again."""

    def __init__(self, state: HubState, tier: StoreTier | None, clock: Callable[[], float]) -> None:
        self._state = state
        self._tier = tier
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()
        self._n_waiting = 0
        self._allowed = float(DELETIONS_A_SECOND)
        self._counted_at = clock()

    async def delete(self, what: Deleted) -> Sequence[Span]:
        """Delete here and, where the store is shared, on all hubs; returns the spans of the chunks that are gone here.

        When it returns, the store has none of it. Raises Busy, StoreFailed or StoreAway where it could not be done.
        """
        if bool(what.request) == bool(what.salt):
            raise InvalidInput("name one: the id of a request, or a cache salt")
        self._check_rate()
        self._n_waiting += 1
        try:
            gone = await self.delete_here(what)
            if self._tier and isinstance(self._tier.store, SharedStore):
                await self._tier.in_saver(self._tier.store.announce, what)
        finally:
            self._n_waiting -= 1
        return gone

    async def delete_here(self, what: Deleted) -> list[Span]:
        """Delete on this hub, and what it knows of in the store."""
        gone: list[Span] = []
        async with self._one_at_a_time:
            for _ in range(MOST_ROUNDS):
                runs = self._runs(what)
                self._end_writes(runs)
                chunks = [chunk for run in runs for chunk in run.chunks.values()]
                if not chunks:
                    return gone
                for at in range(0, len(chunks), AT_ONCE):
                    gone += await self._remove(chunks[at : at + AT_ONCE])
                    await asyncio.sleep(0)  # other requests have their turn
        raise Busy("more of it is stored all the time; ask again when the request has ended")

    def _runs(self, what: Deleted) -> list[Run]:
        indexes = self._state.indexes
        if what.request:
            return indexes.requests.find(what.request)
        return [run for index in indexes.of_salt(what.salt) for run in {*index.runs.values(), *index.growing}]

    def _end_writes(self, runs: Iterable[Run]) -> None:
        """What is being written of the runs is not published."""
        growing = {run for run in runs if run in run.index.growing}
        if growing:
            for lease in [lease for lease in self._state.writes.leases if lease.run in growing]:
                self._state.revoke(lease)

    async def _remove(self, chunks: list[Chunk]) -> list[Span]:
        """Remove chunks from the store, then from index and arena; those that are on their way stay for now."""
        if self._tier:
            await self._tier.stop_moving(chunks)
            await self._tier.discard_now([chunk for chunk in chunks if chunk.saved is Saved.YES])
        cache = self._state.cache
        there = [chunk for chunk in chunks if chunk.run.chunks.get(chunk.span.start) is chunk]
        gone = [chunk for chunk in there if chunk.saved is not Saved.WAITING and chunk not in cache.filling]
        for chunk in gone:
            cache.erase(chunk)
        return [chunk.span for chunk in gone]

    def _check_rate(self) -> None:
        now = self._clock()
        self._allowed = min(self._allowed + (now - self._counted_at) * DELETIONS_A_SECOND, DELETIONS_A_SECOND)
        self._counted_at = now
        if self._allowed < 1 or self._n_waiting >= MOST_WAITING_DELETIONS:
            raise Busy(
                f"the hub deletes {DELETIONS_A_SECOND} requests a second, one after the other, and {self._n_waiting} "
                "wait; ask again later, or delete a salt at once"
            )
        self._allowed -= 1
