"""Windows: stretches of a prompt that are picked whole, in an order of their worth."""

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from blendhub.core.spans import Span
from blendhub_selectors.blocks import Blocks, Positions

Mask = npt.NDArray[np.bool_]


class Windows(msgspec.Struct, frozen=True, eq=False):
    """Window ``i`` holds the tokens from ``starts[i]`` to before ``ends[i]``. The best is the first.

    Windows may overlap, and reach into text that did not move: a token is paid for once, and only if it moved.
    """

    starts: Positions
    ends: Positions

    @classmethod
    def at(cls, starts: Positions, width: int, end: int) -> "Windows":
        """Windows of ``width`` tokens, or fewer before the prompt's ``end``."""
        return cls(starts, np.minimum(starts + width, end))

    def ordered(self, keys: npt.NDArray[Any]) -> "Windows":
        """The windows in the order of their keys, the lowest first; windows with equal keys keep their order."""
        order = np.argsort(keys, kind="stable")
        return Windows(self.starts[order], self.ends[order])

    def where(self, kept: Mask) -> "Windows":
        return Windows(self.starts[kept], self.ends[kept])

    def costs(self, moved: Mask) -> Positions:
        """How many moved tokens each window adds to those before it."""
        return self._counts(self._first(moved))

    def within(self, budget: int, moved: Mask) -> list[Span]:
        """The moved tokens of the first windows, as many as the budget pays for; no window is cut.

        It ends before the first window that is too dear, even if a later one is not: so a larger budget only adds.
        """
        first = self._first(moved)
        paid = np.searchsorted(np.cumsum(self._counts(first)), budget, side="right")
        return _spans_of(first < paid)

    def _counts(self, first: Positions) -> Positions:
        return np.bincount(first, minlength=len(self.starts) + 1)[:-1]

    def _first(self, moved: Mask) -> Positions:
        """For each position the number of the first window that holds it; as many as there are if it did not move."""
        n, lengths = len(self.starts), self.ends - self.starts
        first = np.full(len(moved), n)
        for length in np.unique(lengths):
            numbers = np.flatnonzero(lengths == length)
            begun = np.full(len(moved), n)
            np.minimum.at(begun, self.starts[numbers], numbers)
            np.minimum(first, _least_of_last(begun, int(length)), out=first)
        first[~moved] = n
        return first


def one_after_another(parts: Iterable[Windows]) -> Windows:
    """All windows of the first part, then those of the second, and so on."""
    parts = list(parts)
    return Windows(np.concatenate([part.starts for part in parts]), np.concatenate([part.ends for part in parts]))


def side_by_side(parts: Iterable[tuple[float, Windows]], moved: Mask) -> Windows:
    """The windows of all parts in one order, of which any beginning gives each part its share of the tokens.

    A part that has no windows left leaves its share to the others; one with the share 0 is left out.
    """
    chosen, turns = [], [np.empty(0)]
    for share, windows in parts:
        if share:
            costs = windows.costs(moved)
            chosen.append(windows.where(costs > 0))
            turns.append(np.cumsum(costs[costs > 0]) / share)
    together = one_after_another([Windows(np.empty(0, np.int64), np.empty(0, np.int64)), *chosen])
    return together.ordered(np.concatenate(turns))


def _least_of_last(numbers: Positions, n: int) -> Positions:
    """For each place, the least of the ``n`` numbers that end there."""
    least, done = numbers, 1
    while done < n:
        step = min(done, n - done)
        least = np.concatenate([least[:step], np.minimum(least[step:], least[:-step])])
        done += step
    return least


def _spans_of(mask: Mask) -> list[Span]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return Blocks(edges[::2], edges[1::2]).joined()
