"""Allocates byte ranges of the arena: arithmetic over offsets, without touching memory."""

from blendhub.errors import InvalidInput

GRAIN = 64
"""Sizes are rounded up to whole cache lines."""


class Extents:
    """The free extents of a fixed range of bytes.

    A freed extent is kept for an allocation of the same size; neighbours are merged only when no extent is large
    enough. With slots of one size, allocating and freeing are therefore O(1).
    """

    def __init__(self, size: int) -> None:
        self._starts_by_size: dict[int, list[int]] = {}
        self.free_bytes = size // GRAIN * GRAIN
        if self.free_bytes:
            self._starts_by_size[self.free_bytes] = [0]

    def allocate(self, size: int) -> int | None:
        """Allocate an extent and return its start; None if no free extent is large enough."""
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

    def free_extents(self) -> list[tuple[int, int]]:
        """All free extents as (start, size), ascending."""
        return sorted((start, size) for size, starts in self._starts_by_size.items() for start in starts)

    def _split(self, size: int) -> int | None:
        # The smallest that fits, so that large extents stay whole.
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
        """Merge neighbouring free extents; returns whether there were any."""
        before = self.free_extents()
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
        raise InvalidInput(f"an extent needs at least one byte, got {size}")
    return -(-size // GRAIN) * GRAIN
