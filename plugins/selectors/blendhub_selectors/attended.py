"""Picks the tokens that the end of the prompt attends to most, and the beginnings of spans."""

from math import ceil

from blendhub.contracts import Selection, Selector
from blendhub.core.spans import Span
from blendhub_selectors.options import AttendedOptions
from blendhub_selectors.signals import heads, highest, moved_mask


class AttendedSelector(Selector):
    """What the question looks at decides the answer, so that is what must be right. Beginnings of spans lack most of
    what they would now attend to, and later tokens of the answer may look there. Each gets half of the tokens.

    Where a model's attention cannot be measured, all of them are beginnings.
    """

    def __init__(self, options: AttendedOptions) -> None:
        self.attended_layers = options.layers
        self.attending_tokens = options.attending_tokens
        self._window_tokens = options.window_tokens

    def select(self, selection: Selection) -> list[Span]:
        moved = moved_mask(selection)
        width = self._window_tokens or selection.block_tokens
        windows = heads(selection, width)
        if selection.attended is not None:
            windows = highest(selection.attended, moved, width).alternating_with(windows, moved)
        return windows.within(ceil(selection.ratio * int(moved.sum())), moved)
