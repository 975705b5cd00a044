"""Deletes what requests with a cache salt stored: from the index, the arena and the store."""

import asyncio

from blendhub.contracts import Deleted, SharedStore
from blendhub.core.errors import Busy, InvalidInput
from blendhub.hub.index.namespace_index import Chunk
from blendhub.hub.limits import AT_ONCE
from blendhub.hub.state import HubState
from blendhub.hub.stores.store_tier import StoreTier

MOST_ROUNDS = 8
"""How often a deletion looks for more: what was being saved or loaded is deleted in the round after."""


class Deletion:
    """Deletes one salt after the other. A deletion that failed or was cut off is asked for again."""

    def __init__(self, state: HubState, tier: StoreTier | None) -> None:
        self._state = state
        self._tier = tier
        self._one_at_a_time = asyncio.Lock()

    async def delete(self, salt: str) -> None:
        """Delete here and, where the store is shared, on all hubs. When it returns, the store has none of it.

        Raises Busy, StoreFailed or StoreAway where it could not be done.
        """
        if not salt:
            raise InvalidInput("name a cache salt; KV of requests without one is dropped with Clear")
        if self._tier and self._tier.reads_snapshot:
            raise Busy("the hub has yet to read all that the shared store has; ask again when it has")
        await self.delete_here(salt)
        if self._tier and isinstance(self._tier.store, SharedStore):
            await self._tier.in_saver(self._tier.store.announce, Deleted(salt))

    async def delete_here(self, salt: str) -> None:
        """Delete on this hub, and what it knows of in the store."""
        async with self._one_at_a_time:
            for _ in range(MOST_ROUNDS):
                indexes = [index for index in self._state.indexes if index.namespace.cache_salt == salt]
                runs = {run for index in indexes for run in (*index.runs.values(), *index.growing)}
                for lease in [lease for lease in self._state.writes.leases if lease.run in runs]:
                    self._state.revoke(lease)
                chunks = [chunk for run in runs for chunk in run.chunks.values()]
                if not chunks:
                    return
                for at in range(0, len(chunks), AT_ONCE):
                    await self._remove(chunks[at : at + AT_ONCE])
                    await asyncio.sleep(0)  # other requests have their turn
        raise Busy("more of it is stored all the time; ask again when its requests have ended")

    async def _remove(self, chunks: list[Chunk]) -> None:
        """Remove chunks from the store, then from index and arena; those that are on their way stay for now."""
        if self._tier:
            await self._tier.stop_moving(chunks)
            await self._tier.discard_now([chunk for chunk in chunks if chunk.in_store])
        cache, being_saved = self._state.cache, self._tier.writer.batch if self._tier else {}
        for chunk in chunks:
            is_there = chunk.run.chunks.get(chunk.span.start) is chunk
            if is_there and chunk not in being_saved and chunk not in cache.filling:
                cache.erase(chunk)
