"""The arena and what stands in it: slots are given out here, and taken back by eviction."""

from blendhub.hub.arena import Arena
from blendhub.hub.eviction import EvictionPolicy
from blendhub.hub.extents import rounded
from blendhub.hub.index import Chunk, Saved


class Cache:
    """Chunks in the arena. Every chunk here has a slot, is matchable, and stands in the order of eviction."""

    def __init__(self, arena: Arena, policy: EvictionPolicy[Chunk]) -> None:
        self.arena = arena
        self.policy = policy
        self.filling: dict[Chunk, int] = {}
        """Offsets of slots into which the store is reading chunks."""
        self.evictions = 0
        self.forgotten = 0
        """Evicted chunks that no store had; their tokens are matched no more."""

    def allocate(self, size: int) -> int | None:
        """The offset of a new slot, evicting as needed; None if all that would have to go is pinned."""
        extents = self.arena.extents
        freed = 0
        while (offset := extents.allocate(size)) is None:
            victim = None
            if freed >= size:
                # Enough bytes, but scattered: slots of another size are in the way. One large victim makes room.
                victim = self.policy.evict(lambda chunk: _stays(chunk) or slot_bytes(chunk) < size)
            victim = victim or self.policy.evict(_stays)
            if victim is None:
                return None
            freed += rounded(slot_bytes(victim))
            self._evict(victim)
        return offset

    def begin_filling(self, chunk: Chunk) -> int | None:
        """A slot for a chunk that is to be read from the store; None if there is no room."""
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
        """Take a chunk out of the arena; the caller sees to the index."""
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


def _stays(chunk: Chunk) -> bool:
    return chunk.pins > 0 or chunk.saved is Saved.WAITING
