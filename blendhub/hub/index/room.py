"""Room for indexes: what they take beyond the KV that they index is bounded, and charged to the engines that store it.

A namespace costs some memory however little it stores, and so do tokens that are kept for a chunk behind a prefix that
is not stored. Clients choose both: each value of vLLM's cache_salt makes a namespace.
"""

import logging
from collections.abc import Callable, Iterable
from itertools import islice

from blendhub.core.errors import ArenaFull
from blendhub.hub.index.namespace_index import Chunk, NamespaceIndex
from blendhub.hub.index.table import IndexTable
from blendhub.hub.leases.write_leases import WriteLeases
from blendhub.hub.limits import FREE_INDEX_BYTES, MOST_CHUNKS, MOST_TRIES

log = logging.getLogger(__name__)


class IndexRoom:
    """Makes room for the index of what is stored next."""

    def __init__(
        self, indexes: IndexTable, writes: WriteLeases, drop: Callable[[Iterable[Chunk]], list[Chunk]]
    ) -> None:
        """``drop`` drops chunks that are not pinned, and returns those of them that the store has."""
        self.evictions = 0
        """The number of chunks that were dropped."""
        self.discard: Callable[[Iterable[Chunk]], None] | None = None
        """Discards chunks from a store that only this hub uses. In a shared store, other hubs use them."""
        self._indexes = indexes
        self._writes = writes
        self._drop = drop

    def make(self, base: str) -> None:
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
        in_store = self._drop(list(islice(run.chunks.values(), MOST_CHUNKS)))
        if in_store and self.discard:
            self.discard(in_store)
        if not index.runs and not self._writes.is_writing(index):
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
