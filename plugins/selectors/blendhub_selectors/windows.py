"""Windows: stretches of a prompt that are picked whole, in an order of their worth."""

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

    def alternating_with(self, others: "Windows", moved: Mask) -> "Windows":
        """These windows and others, in an order in which both have as many tokens at any point."""
        both = Windows(np.concatenate([self.starts, others.starts]), np.concatenate([self.ends, others.ends]))
        return both.ordered(
            np.concatenate([np.cumsum(windows._added(windows._first(moved))) for windows in (self, others)])
        )

    def within(self, budget: int, moved: Mask) -> list[Span]:
        """The moved tokens of the first windows, as many as the budget pays for; no window is cut.

        It ends before the first window that is too dear, even if a later one is not: so a larger budget only adds.
        """
        first = self._first(moved)
        return _spans_of(first < np.searchsorted(np.cumsum(self._added(first)), budget, side="right"))

    def _added(self, first: Positions) -> Positions:
        """The tokens of each window that are in none before it."""
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
