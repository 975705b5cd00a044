"""The limit on what indexes take beyond the KV that they index, charged to the engines that store it.

A namespace costs some memory however little it stores, and so do tokens that are kept for a chunk behind a prefix that
is not stored. Clients choose both: each value of vLLM's cache_salt makes a namespace.
"""

import logging
from itertools import islice

from blendhub.core.errors import ArenaFull
from blendhub.hub.index.namespace_index import NamespaceIndex
from blendhub.hub.index.table import IndexTable
from blendhub.hub.limits import FREE_INDEX_BYTES, MOST_CHUNKS, MOST_TRIES
from blendhub.hub.memory.cache import Cache
from blendhub.hub.stores.store_tier import StoreTier

log = logging.getLogger(__name__)


class IndexLimit:
    """Makes room for the index of what is stored next, within the limit on the memory of all indexes."""

    def __init__(self, indexes: IndexTable, cache: Cache, tier: StoreTier | None) -> None:
        self.evictions = 0
        """The number of chunks that were dropped."""
        self._indexes = indexes
        self._cache = cache
        self._tier = tier

    def make_room(self, base: str) -> None:
        """Drop the oldest text of the engine whose indexes take the most, then of the next, while all take too much.

        Raises ArenaFull where too little can be dropped and the asking engine, of namespace ``base``, takes more than
        an equal share; engines that take less are never refused.
        """
        dropped = failed = 0
        while sum((excess := self._indexes.excess()).values()) > FREE_INDEX_BYTES:
            if dropped >= MOST_CHUNKS or failed >= MOST_TRIES:
                return _check_share(base, excess)
            index = self._indexes.oldest_costly(max(excess, key=excess.__getitem__))
            n_chunks = self._drop_oldest_run(index)
            if n_chunks:
                self._note(index, n_chunks)
            else:
                self._indexes.defer(index)
                failed += 1
            dropped += n_chunks
        return None

    def _drop_oldest_run(self, index: NamespaceIndex) -> int:
        """Drop a run and return the number of its chunks; 0 if all are in use, or a thread works on the index."""
        run = next(iter(index.runs.values()), None)
        if run is None or not index.queue.is_idle:
            return 0
        before = index.n_chunks
        in_store = self._cache.drop(list(islice(run.chunks.values(), MOST_CHUNKS)))
        # In a shared store, other hubs use them.
        if in_store and self._tier and not self._tier.is_shared:
            self._tier.discard(in_store)
        if not index.runs and not index.growing:
            self._indexes.remove(index)
        return before - index.n_chunks

    def _note(self, index: NamespaceIndex, n_chunks: int) -> None:
        if not self.evictions:
            log.warning(
                "engines of %s use many values of cache_salt, or store little behind long prefixes that are not: all "
                "indexes take too much memory beyond their KV, and theirs take the most, so the text that they stored "
                "first is dropped; blendhub_index_evictions_total counts its chunks",
                index.namespace.model,
            )
        self.evictions += n_chunks


def _check_share(base: str, excess: dict[str, int]) -> None:
    if excess.get(base, 0) > FREE_INDEX_BYTES / len(excess):
        raise ArenaFull(
            f"this engine's index takes {excess[base] / 2**20:.0f} MiB more than its KV, and the oldest of that is in "
            "use: the engine uses many values of cache_salt, or stores little behind long prefixes that are not; try "
            "again later, or drop a namespace with Clear"
        )
