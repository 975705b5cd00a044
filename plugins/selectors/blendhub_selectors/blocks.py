"""Arithmetic on many spans at once: a prompt may have hundreds of thousands of blocks."""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from blendhub.core.spans import Span

Positions = npt.NDArray[np.int64]


class Blocks(msgspec.Struct, frozen=True, eq=False):
    """Block ``i`` holds the tokens from ``starts[i]`` to before ``ends[i]``. No block is empty, and none overlap."""

    starts: Positions
    ends: Positions

    @classmethod
    def of(cls, spans: Sequence[Span]) -> "Blocks":
        """One block for each span."""
        return cls(
            np.array([span.start for span in spans], np.int64),
            np.array([span.end for span in spans], np.int64),
        )

    @property
    def lengths(self) -> Positions:
        return self.ends - self.starts

    def split(self, width: int) -> "Blocks":
        """Each block cut into ones of ``width`` tokens; what is left at its end is a shorter one."""
        lengths = self.lengths
        width = min(width, int(lengths.max(initial=1)))
        counts = -(-lengths // width)
        first = np.cumsum(counts) - counts
        index = np.arange(counts.sum()) - np.repeat(first, counts)
        starts = np.repeat(self.starts, counts) + index * width
        return Blocks(starts, np.minimum(starts + width, np.repeat(self.ends, counts)))

    def within(self, budget: int, order: Positions) -> "Blocks":
        """The first blocks in ``order``, as many as the budget pays for; the last one is cut to use it up."""
        starts, lengths = self.starts[order], self.lengths[order]
        room = np.clip(budget - (np.cumsum(lengths) - lengths), 0, lengths)
        chosen = np.flatnonzero(room)
        chosen = chosen[np.argsort(starts[chosen])]
        return Blocks(starts[chosen], starts[chosen] + room[chosen])

    def joined(self) -> list[Span]:
        """Ascending blocks as spans, with those that touch made one."""
        if not len(self.starts):
            return []
        apart = self.starts[1:] != self.ends[:-1]
        starts = self.starts[np.concatenate([[True], apart])]
        ends = self.ends[np.concatenate([apart, [True]])]
        return [Span(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
