"""The chunks that requests have asked to keep: they are evicted after all others, but they are evicted."""

from collections import Counter

from blendhub.hub.index.namespace_index import Chunk

KEPT_SHARE = 0.125
"""The most of an arena that the kept chunks of one namespace may take: each tenant with a salt has one."""
ALL_KEPT_SHARE = 0.5
"""The most of an arena that all kept chunks may take."""
GRAIN_S = 10.0
"""Deadlines are rounded up to multiples of this."""


class KeptChunks:
    def __init__(self, arena_bytes: int) -> None:
        self._most_of_one, self._most = int(KEPT_SHARE * arena_bytes), int(ALL_KEPT_SHARE * arena_bytes)
        self._until: dict[Chunk, float] = {}
        self._by_time: dict[float, dict[Chunk, None]] = {}
        self._bytes: Counter[str] = Counter()
        """The bytes of kept chunks, by namespace."""
        self._total = 0
        self.refused = 0
        """How often a chunk was not kept because the others took their share."""

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._until

    def __len__(self) -> int:
        return len(self._until)

    def add(self, chunk: Chunk, until: float) -> bool:
        """Keep a chunk until this time, or for as long as it was to be kept before; False: there is no room for it."""
        size, namespace = _size(chunk), chunk.run.index.digest
        if chunk in self._until:
            until = max(until, self._until[chunk])
            self.remove(chunk)
        elif self._bytes[namespace] + size > self._most_of_one or self._total + size > self._most:
            self.refused += 1
            return False
        until = -(-until // GRAIN_S) * GRAIN_S
        self._until[chunk] = until
        self._by_time.setdefault(until, {})[chunk] = None
        self._bytes[namespace] += size
        self._total += size
        return True

    def remove(self, chunk: Chunk) -> None:
        until = self._until.pop(chunk)
        of_time = self._by_time[until]
        del of_time[chunk]
        if not of_time:
            del self._by_time[until]
        self._bytes[chunk.run.index.digest] -= _size(chunk)
        self._total -= _size(chunk)

    def expired(self, now: float) -> list[Chunk]:
        """The chunks whose time is over."""
        return [chunk for until, chunks in self._by_time.items() if until <= now for chunk in chunks]


def _size(chunk: Chunk) -> int:
    return chunk.run.index.namespace.slot_bytes
