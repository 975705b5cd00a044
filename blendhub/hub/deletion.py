"""Deletes what is stored in some namespaces, or is being stored there: from the store, the index and the arena."""

import asyncio
from collections.abc import Callable

from blendhub.contracts import Deleted, SharedStore
from blendhub.core.errors import Busy, InvalidInput
from blendhub.hub.index.namespace_index import Chunk, NamespaceIndex, Run
from blendhub.hub.limits import AT_ONCE
from blendhub.hub.state import HubState
from blendhub.hub.stores.store_tier import StoreTier

MAX_ROUNDS = 8
"""How often a deletion looks for more: what was being saved or loaded is deleted in the round after."""


class Deletion:
    """Does one deletion after the other. Whoever asked for one that failed, or was cut off, asks again."""

    def __init__(self, state: HubState, tier: StoreTier | None) -> None:
        self._state = state
        self._tier = tier
        self._one_at_a_time = asyncio.Lock()

    async def delete(self, salt: str) -> None:
        """Delete what requests with a cache salt stored, here and, where the store is shared, on all hubs.

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
        """Delete what requests with a cache salt stored on this hub, and what it knows of in the store."""
        await self._delete(lambda: self._runs_of(lambda index: index.namespace.cache_salt == salt))

    async def clear(self, concerns: Callable[[NamespaceIndex], bool]) -> None:
        """Delete all that some namespaces have now on this hub, and what it knows of in the store.

        Rights to write there end, and what was read under a lease must not be used. Raises as ``delete`` does.
        """
        runs = self._runs_of(concerns)
        await self._delete(lambda: runs)

    def _runs_of(self, concerns: Callable[[NamespaceIndex], bool]) -> set[Run]:
        indexes = [index for index in self._state.indexes if concerns(index)]
        return {run for index in indexes for run in (*index.runs.values(), *index.growing)}

    async def _delete(self, runs_left: Callable[[], set[Run]]) -> None:
        """Delete runs, until there are none of these left."""
        async with self._one_at_a_time:
            for _ in range(MAX_ROUNDS):
                runs = runs_left()
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
        discarded: set[Chunk] = set()
        if self._tier:
            await self._tier.stop_moving(chunks)
            discarded = {chunk for chunk in chunks if chunk.in_store}
            await self._tier.discard(discarded)
        cache, being_saved = self._state.cache, self._tier.writer.batch if self._tier else {}
        for chunk in chunks:
            is_there = chunk.run.chunks.get(chunk.span.start) is chunk
            is_on_its_way = chunk in being_saved or chunk in cache.filling
            was_saved_meanwhile = chunk.in_store and chunk not in discarded
            if is_there and not is_on_its_way and not was_saved_meanwhile:
                cache.erase(chunk)
