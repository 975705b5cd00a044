"""Picks the tokens that the end of the prompt attends to most."""

from math import ceil

from blendhub.contracts import Selection, Selector
from blendhub.core.spans import Span
from blendhub_selectors.options import AttendedOptions
from blendhub_selectors.signals import highest, moved_mask


class AttendedSelector(Selector):
    """What the question looks at decides the answer, so that is what must be right."""

    def __init__(self, options: AttendedOptions) -> None:
        self.attended_layers = options.layers
        self.attending_tokens = options.attending_tokens
        self._window_tokens = options.window_tokens

    def pick(self, selection: Selection) -> list[Span]:
        assert selection.attended is not None, "Selector.select refuses calls without it"
        moved = moved_mask(selection)
        windows = highest(selection.attended, moved, self._window_tokens)
        return windows.within(ceil(selection.ratio * int(moved.sum())), moved)
