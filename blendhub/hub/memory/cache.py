"""The chunks in the arena: allocates their slots, and evicts chunks to make room."""

from blendhub.hub.index.namespace_index import Chunk
from blendhub.hub.limits import MAX_TRIES
from blendhub.hub.memory.arena import Arena
from blendhub.hub.memory.eviction import EvictionOrder


class Cache:
    """Chunks in the arena. Every chunk here has a slot, is matchable, and is in the order of eviction."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.policy = EvictionOrder()
        self.erased: set[Chunk] = set()
        """The chunks that were deleted while they were read. No lookup finds them, what was read must not be used, and
        their slots are free afterwards."""
        self.filling: dict[Chunk, int] = {}
        """The chunks that the store is being read into, and the offsets of their slots."""
        self.evictions = 0
        self.forgotten = 0
        """The number of evicted chunks that no store had; their tokens are no longer matchable."""
        self._chunk_at: dict[int, Chunk] = {}
        """The chunks in the arena, by offset."""

    def allocate(self, size: int) -> int | None:
        """The offset of a new slot, evicting chunks as needed; None if every chunk in the way is pinned."""
        extents = self.arena.extents
        offset = extents.allocate(size)
        if offset is None:
            for chunk in self._chunks_in_the_way(extents.rounded(size)):
                self._evict(chunk)
            offset = extents.allocate(size)
        return offset

    def pin(self, chunk: Chunk) -> None:
        """Keep the chunk in the arena until it is unpinned as often as it was pinned."""
        chunk.pins += 1
        if chunk.pins == 1 and chunk.offset is not None:
            self.policy.of(chunk).hold(chunk)

    def unpin(self, chunk: Chunk) -> None:
        chunk.pins -= 1
        if chunk.pins or chunk.offset is None:
            return
        if chunk in self.erased:
            self.erased.remove(chunk)
            self._free(chunk)
        else:
            self.policy.of(chunk).release(chunk)

    def begin_filling(self, chunk: Chunk) -> int | None:
        """Allocate a slot for a chunk that is to be read from the store; None if the arena is full."""
        assert chunk.offset is None, "a chunk that has a slot is not read into another one"
        offset = self.allocate(chunk.slot_bytes)
        if offset is not None:
            self.filling[chunk] = offset
            self.pin(chunk)
        return offset

    def end_filling(self, chunk: Chunk, *, whole: bool) -> None:
        offset = self.filling.pop(chunk)
        self.unpin(chunk)
        if whole:
            self.insert(chunk, offset)
        else:
            self.arena.extents.free(offset, chunk.slot_bytes)

    def shards(self, chunk: Chunk) -> list[memoryview]:
        """The shards in a chunk's slot, and its states or maps; while the store is being read, those of the slot to
        fill."""
        namespace, size = chunk.run.index.namespace, chunk.run.index.namespace.shard_bytes
        offset = self.filling[chunk] if chunk.offset is None else chunk.offset
        shards = [self.arena.slot(offset + start, size) for start in range(0, namespace.slot_bytes, size)]
        if behind := namespace.bytes_behind(chunk.run.provenance, chunk.span.end):
            starts = [namespace.map_start(rank, behind) for rank in range(namespace.world_size)]
            shards += [self.arena.slot(offset + start, behind) for start in starts]
        return shards

    def insert(self, chunk: Chunk, offset: int) -> None:
        """Add a chunk whose KV is complete at this offset."""
        chunk.offset = offset
        self._chunk_at[offset] = chunk
        self.policy.of(chunk).insert(chunk, chunk.content)
        if chunk.pins:
            self.policy.of(chunk).hold(chunk)

    def erase(self, chunk: Chunk) -> None:
        """Remove a chunk from index and arena for good, pinned or not."""
        chunk.run.index.drop(chunk)
        if chunk.offset is None:
            return
        self.policy.of(chunk).remove(chunk)
        if chunk.pins:
            self.erased.add(chunk)
        else:
            self._free(chunk)

    def remove(self, chunk: Chunk) -> None:
        """Remove a chunk from the arena alone."""
        self.policy.of(chunk).remove(chunk)
        self._free(chunk)

    def _chunks_in_the_way(self, size: int) -> list[Chunk]:
        """Chunks whose eviction frees ``size`` bytes in one piece, if there are any; the policy knows them no longer.

        They lie around the chunk that the policy evicts first. Where pinned chunks leave too little room around it, the
        policy's next chunk is tried, and a chunk that was tried in vain goes to the end of the policy's order.
        """
        tried: list[Chunk] = []
        in_the_way: list[Chunk] = []
        while len(tried) < MAX_TRIES and (first := self.policy.evict()):
            assert first.offset is not None
            room, starts = self._around(first.offset, size)
            if room >= size:
                in_the_way = [self._chunk_at[start] for start in starts if start in self._chunk_at]
                break
            tried.append(first)
        for chunk in tried:
            self.policy.of(chunk).insert(chunk, chunk.content)
        for chunk in in_the_way[1:]:
            self.policy.of(chunk).remove(chunk)
        return in_the_way

    def _around(self, start: int, size: int) -> tuple[int, list[int]]:
        """The bytes that the extent at ``start`` and its evictable neighbours make in one piece, up to ``size``, and
        the starts of these extents, that extent's first.
        """
        extents = self.arena.extents
        first = last = start
        starts, room = [start], extents.size_of(start)
        while room < size:
            following, before = extents.after(last), extents.before(first)
            if following is not None and self._is_evictable(following):
                last = reached = following
            elif before is not None and self._is_evictable(before):
                first = reached = before
            else:
                break
            room += extents.size_of(reached)
            starts.append(reached)
        return room, starts

    def _is_evictable(self, start: int) -> bool:
        """Whether the extent that starts there is free, or holds a chunk that may be evicted."""
        chunk = self._chunk_at.get(start)
        return not chunk.pins if chunk else self.arena.extents.is_free(start)

    def _evict(self, chunk: Chunk) -> None:
        self.evictions += 1
        self._free(chunk)
        if not chunk.in_store:
            self.forgotten += 1
            chunk.run.index.drop(chunk)

    def _free(self, chunk: Chunk) -> None:
        assert chunk.offset is not None
        del self._chunk_at[chunk.offset]
        self.arena.extents.free(chunk.offset, chunk.slot_bytes)
        chunk.offset = None
