"""What selectors go by: the beginnings of spans, and the highest of measured numbers."""

import numpy as np
import numpy.typing as npt

from blendhub.contracts import Selection
from blendhub.contracts.selection import Scores
from blendhub_selectors.blocks import Blocks
from blendhub_selectors.windows import Mask, Windows


def moved_mask(selection: Selection) -> Mask:
    """For each position of the prompt, whether it moved."""
    change = np.zeros(len(selection.tokens) + 1, np.int8)
    spans = Blocks.of(selection.moved)
    change[spans.ends] -= 1
    change[spans.starts] += 1
    return np.cumsum(change[:-1]).astype(bool)


def heads(selection: Selection, width: int) -> Windows:
    """The spans from their beginnings on: the first ``width`` tokens of each, then the next of each, and so on."""
    spans = Blocks.of(selection.moved)
    windows = spans.split(width)
    span = np.searchsorted(spans.starts, windows.starts, side="right") - 1
    return Windows(windows.starts, windows.ends).ordered(windows.starts - spans.starts[span])


def highest(numbers: Scores, moved: Mask, width: int) -> Windows:
    """A window from each moved token on, that of the highest number first; of equals the earlier one."""
    at = np.flatnonzero(moved)
    best_first = at[np.argsort(-finite_or_highest(numbers[at]), kind="stable")]
    return Windows.at(best_first, width, len(moved))


def finite_or_highest(numbers: Scores) -> npt.NDArray[np.float64]:
    return np.where(np.isfinite(numbers), numbers, np.inf).astype(np.float64)
