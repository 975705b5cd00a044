"""Where in the arena there is room: arithmetic over offsets, no memory."""

from blendhub.errors import InvalidInput

GRAIN = 64
"""Sizes are rounded up to whole cache lines."""


class Extents:
    """Free stretches of a fixed range of bytes.

    A stretch that is given back waits for a taker of the same size; neighbours are merged only when no
    stretch is large enough. With slots of one size, taking and giving back are therefore O(1) for ever.
    """

    def __init__(self, size: int) -> None:
        self._starts_by_size: dict[int, list[int]] = {}
        self.free_bytes = size // GRAIN * GRAIN
        if self.free_bytes:
            self._starts_by_size[self.free_bytes] = [0]

    def allocate(self, size: int) -> int | None:
        """The start of a stretch, which is free no longer; None if no stretch is large enough."""
        size = rounded(size)
        if size > self.free_bytes:
            return None
        start = self._split(size)
        if start is None and self._merge():
            start = self._split(size)
        if start is not None:
            self.free_bytes -= size
        return start

    def free(self, start: int, size: int) -> None:
        size = rounded(size)
        self._starts_by_size.setdefault(size, []).append(start)
        self.free_bytes += size

    def stretches(self) -> list[tuple[int, int]]:
        """All free stretches as (start, size), ascending."""
        return sorted((start, size) for size, starts in self._starts_by_size.items() for start in starts)

    def _split(self, size: int) -> int | None:
        # The smallest that fits, so that large stretches stay whole; a same-sized one is the smallest of all.
        found = size if size in self._starts_by_size else min((s for s in self._starts_by_size if s > size), default=0)
        if not found:
            return None
        starts = self._starts_by_size[found]
        start = starts.pop()
        if not starts:
            del self._starts_by_size[found]
        if found > size:
            self._starts_by_size.setdefault(found - size, []).append(start + size)
        return start

    def _merge(self) -> bool:
        """Join neighbours; returns whether there were any."""
        before = self.stretches()
        merged: list[tuple[int, int]] = []
        for start, size in before:
            if merged and sum(merged[-1]) == start:
                start, size = merged[-1][0], merged.pop()[1] + size
            merged.append((start, size))
        self._starts_by_size = {}
        for start, size in merged:
            self._starts_by_size.setdefault(size, []).append(start)
        return len(merged) < len(before)


def rounded(size: int) -> int:
    if size <= 0:
        raise InvalidInput(f"a stretch needs at least one byte, got {size}")
    return -(-size // GRAIN) * GRAIN
