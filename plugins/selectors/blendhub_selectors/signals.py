"""The beginnings of spans: tokens to compute again for their place."""

from collections.abc import Sequence

import numpy as np

from blendhub.contracts import Selection
from blendhub.core.spans import Span
from blendhub_selectors.blocks import Blocks, Positions
from blendhub_selectors.windows import Mask, Windows


def moved_mask(selection: Selection) -> Mask:
    """For each position of the prompt, whether it moved."""
    change = np.zeros(len(selection.tokens) + 1, np.int8)
    spans = Blocks.of(selection.moved)
    change[spans.ends] -= 1
    change[spans.starts] += 1
    return np.cumsum(change[:-1]).astype(bool)


def heads(selection: Selection, width: int, most: int | None = None, after_hole: int = 1) -> Windows:
    """The spans from their beginnings on: the first ``width`` tokens of each, then the next of each, and so on.

    It ends after ``most`` tokens of each span. Both are ``after_hole`` times as many for spans right behind a hole: the
    text before those is another one.
    """
    spans = Blocks.of(selection.moved)
    times = np.where(np.isin(spans.starts, _ends(selection.holes)), after_hole, 1)
    ends = spans.ends if most is None else np.minimum(spans.ends, spans.starts + most * times)
    windows = Blocks(spans.starts, ends).split(width)
    span = np.searchsorted(spans.starts, windows.starts, side="right") - 1
    turns = (windows.starts - spans.starts[span]) // (width * times[span])
    return Windows(windows.starts, windows.ends).ordered(turns)


def _ends(spans: Sequence[Span]) -> Positions:
    return np.array([span.end for span in spans], np.int64)
