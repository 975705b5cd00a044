"""The chunks in the arena: allocates their slots, and evicts chunks to make room."""

from blendhub.hub.arena import Arena
from blendhub.hub.eviction import EvictionPolicy
from blendhub.hub.extents import rounded
from blendhub.hub.index import Chunk, Saved


class Cache:
    """Chunks in the arena. Every chunk here has a slot, is matchable, and is known to the eviction policy."""

    def __init__(self, arena: Arena, policy: EvictionPolicy[Chunk]) -> None:
        self.arena = arena
        self.policy = policy
        self.filling: dict[Chunk, int] = {}
        """Offsets of slots into which the store is reading chunks."""
        self.evictions = 0
        self.forgotten = 0
        """Evicted chunks that no store had; their tokens are no longer matchable."""

    def allocate(self, size: int) -> int | None:
        """The offset of a new slot, evicting chunks as needed; None if every chunk in the way is pinned."""
        extents = self.arena.extents
        freed = 0
        while (offset := extents.allocate(size)) is None:
            victim = None
            if freed >= size:
                # Enough bytes are free, but not in one piece. One victim that is large enough makes a piece.
                victim = self.policy.evict(lambda chunk: _is_kept(chunk) or slot_bytes(chunk) < size)
            victim = victim or self.policy.evict(_is_kept)
            if victim is None:
                return None
            freed += rounded(slot_bytes(victim))
            self._evict(victim)
        return offset

    def begin_filling(self, chunk: Chunk) -> int | None:
        """Allocate a slot for a chunk that is to be read from the store; None if the arena is full."""
        offset = self.allocate(slot_bytes(chunk))
        if offset is not None:
            self.filling[chunk] = offset
            chunk.pins += 1
        return offset

    def end_filling(self, chunk: Chunk, *, whole: bool) -> None:
        offset = self.filling.pop(chunk)
        chunk.pins -= 1
        if whole:
            self.insert(chunk, offset)
        else:
            self.arena.extents.free(offset, slot_bytes(chunk))

    def insert(self, chunk: Chunk, offset: int) -> None:
        """The chunk's KV is complete at this offset."""
        chunk.offset = offset
        self.policy.insert(chunk, chunk.content)

    def remove(self, chunk: Chunk) -> None:
        """Remove a chunk from the arena; the caller removes it from the index."""
        self.policy.remove(chunk)
        self._free(chunk)

    def _evict(self, chunk: Chunk) -> None:
        self.evictions += 1
        self._free(chunk)
        if chunk.saved is not Saved.YES:
            self.forgotten += 1
            chunk.run.index.drop(chunk)

    def _free(self, chunk: Chunk) -> None:
        assert chunk.offset is not None
        self.arena.extents.free(chunk.offset, slot_bytes(chunk))
        chunk.offset = None


def slot_bytes(chunk: Chunk) -> int:
    return chunk.run.index.namespace.slot_bytes


def _is_kept(chunk: Chunk) -> bool:
    return chunk.pins > 0 or chunk.saved is Saved.WAITING
