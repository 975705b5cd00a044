"""The reasons to compute a token again: its place in a span, and how much its KV changed in another context."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from blendhub.contracts import Selection
from blendhub.contracts.selection import Scores
from blendhub.core.spans import Span
from blendhub_selectors.blocks import Blocks, Positions
from blendhub_selectors.windows import Mask, Windows, one_after_another


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


def learned(selection: Selection, moved: Mask, width: int, after_hole: int = 1) -> Windows:
    """A window from each token on, those first whose KV changed most in another context.

    Where nothing is known of a token, it counts as much as the average of those that are known, and the beginnings of
    spans come first.
    """
    known = np.flatnonzero(moved & (selection.sensitivity > 0))
    values = selection.sensitivity[known]
    highest = np.argsort(~values, kind="stable")
    above = int((values > values.mean()).sum()) if len(values) else 0
    positions = heads(selection, width, None, after_hole)
    unknown = positions.where(means(moved & (selection.sensitivity == 0), positions) > 0)
    changed, rest = (Windows.at(known[some], width, len(moved)) for some in (highest[:above], highest[above:]))
    return one_after_another([changed, unknown, rest])


def highest(numbers: Scores, moved: Mask, width: int) -> Windows:
    """A window from each moved token on, that of the highest number first; of equals the earlier one."""
    at = np.flatnonzero(moved)
    best_first = at[np.argsort(-finite_or_highest(numbers[at]), kind="stable")]
    return Windows.at(best_first, width, len(moved))


def finite_or_highest(numbers: Scores) -> npt.NDArray[np.float64]:
    return np.where(np.isfinite(numbers), numbers, np.inf).astype(np.float64)


def sensitivity_squared(selection: Selection, moved: Mask) -> npt.NDArray[np.float64]:
    """For each position the square of its sensitivity against the average: 1 where nothing is known."""
    known = moved & (selection.sensitivity > 0)
    average = selection.sensitivity[known].mean() if known.any() else 1.0
    return np.where(known, selection.sensitivity / average, 1.0) ** 2


def means(values: npt.NDArray[Any], windows: Windows) -> npt.NDArray[np.float64]:
    """The mean of the values in each window."""
    before = np.concatenate([[0.0], np.cumsum(values)])
    return (before[windows.ends] - before[windows.starts]) / (windows.ends - windows.starts)


def _ends(spans: Sequence[Span]) -> Positions:
    return np.array([span.end for span in spans], np.int64)
