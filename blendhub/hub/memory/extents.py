"""Allocates byte ranges of the arena: arithmetic over offsets, without touching memory."""

from bisect import bisect_left, insort

from blendhub.core.errors import InvalidInput
from blendhub.hub.limits import MAX_SLOTS_OF_AN_ARENA

GRAIN = 64
"""Sizes are rounded up to whole cache lines."""


class Extents:
    """A range of bytes that may grow, cut in extents that are free or in use.

    Each extent finds its two neighbours in one step, and free neighbours are always one extent. So no call looks at
    more than a few extents, however many there are.
    """

    def __init__(self, most: int) -> None:
        """``most`` is the size that the range may grow to; it is empty at first."""
        self.size = 0
        self.least = -(-most // MAX_SLOTS_OF_AN_ARENA // GRAIN) * GRAIN
        """The smallest size of an extent; smaller requests take as much."""
        self.free_bytes = 0
        self._sizes: dict[int, int] = {}
        """The size of every extent, by its start."""
        self._starts: dict[int, int] = {}
        """The start of every extent, by its end."""
        self._free: dict[int, dict[int, None]] = {}
        """The starts of the free extents, by size."""
        self._free_sizes: list[int] = []

    def grow(self, size: int) -> None:
        """Add free bytes at the end, until the range has ``size`` of them."""
        start, self.size = self.size, size // GRAIN * GRAIN
        last = self.before(start)
        if last is not None and self.is_free(last):
            self._remove_free(last, start - last)
            start = last
        if start < self.size:
            self._add_free(start, self.size - start)

    def allocate(self, size: int) -> int | None:
        """Allocate an extent and return its start; None if no free extent is large enough."""
        size = self.rounded(size)
        # The smallest that fits, so that large extents stay whole.
        at = bisect_left(self._free_sizes, size)
        if at == len(self._free_sizes):
            return None
        free_size = self._free_sizes[at]
        start = next(reversed(self._free[free_size]))
        self._remove_free(start, free_size)
        self._sizes[start] = size
        self._starts[start + size] = start
        if free_size > size:
            self._add_free(start + size, free_size - size)
        return start

    def free(self, start: int, size: int) -> None:
        size = self.rounded(size)
        if self._sizes.get(start) != size or self.is_free(start):
            raise InvalidInput(f"[{start}, {start + size}) is not an extent in use, so it cannot be freed")
        del self._sizes[start], self._starts[start + size]
        before, after = self.before(start), start + size
        if before is not None and self.is_free(before):
            self._remove_free(before, start - before)
            start, size = before, start + size - before
        if after in self._sizes and self.is_free(after):
            size += self._sizes[after]
            self._remove_free(after, self._sizes[after])
        self._add_free(start, size)

    def rounded(self, size: int) -> int:
        if size <= 0:
            raise InvalidInput(f"an extent needs at least one byte, got {size}")
        return max(-(-size // GRAIN) * GRAIN, self.least)

    def size_of(self, start: int) -> int:
        """The size of the extent that starts there, free or in use."""
        return self._sizes[start]

    def is_free(self, start: int) -> bool:
        """Whether the extent that starts there is free."""
        return start in self._free.get(self._sizes[start], ())

    def before(self, start: int) -> int | None:
        """The start of the extent that ends there; None at the beginning of the range."""
        return self._starts.get(start)

    def after(self, start: int) -> int | None:
        """The start of the extent behind the one that starts there; None at the end of the range."""
        end = start + self._sizes[start]
        return end if end < self.size else None

    def free_extents(self) -> list[tuple[int, int]]:
        """All free extents as (start, size), ascending."""
        return sorted((start, size) for size, starts in self._free.items() for start in starts)

    def _add_free(self, start: int, size: int) -> None:
        self._sizes[start] = size
        self._starts[start + size] = start
        if size not in self._free:
            self._free[size] = {}
            insort(self._free_sizes, size)
        self._free[size][start] = None
        self.free_bytes += size

    def _remove_free(self, start: int, size: int) -> None:
        del self._sizes[start], self._starts[start + size]
        starts = self._free[size]
        del starts[start]
        if not starts:
            del self._free[size]
            del self._free_sizes[bisect_left(self._free_sizes, size)]
        self.free_bytes -= size
