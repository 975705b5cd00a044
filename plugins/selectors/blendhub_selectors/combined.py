"""Picks whole windows, in an order that follows from what is known of the prompt."""

from math import ceil

from blendhub.contracts import Selection, Selector
from blendhub.core.spans import Span
from blendhub_selectors.options import CombinedOptions
from blendhub_selectors.question import question
from blendhub_selectors.signals import heads, moved_mask
from blendhub_selectors.windows import Mask, Windows, one_after_another, side_by_side


class CombinedSelector(Selector):
    """Two signals share the budget: beginnings of spans, and the question's words.

    Windows are picked until the budget is used up. Their order does not depend on it, so more of it only adds.
    """

    def __init__(self, options: CombinedOptions) -> None:
        self._options = options

    def pick(self, selection: Selection) -> list[Span]:
        moved = moved_mask(selection)
        return self.order(selection, moved).within(ceil(selection.ratio * int(moved.sum())), moved)

    def order(self, selection: Selection, moved: Mask) -> Windows:
        """All windows, the best first. What the signals leave of the budget goes to the beginnings of spans."""
        options = self._options
        windows, worth = question(selection, moved, options.question_tokens, options.question_before)
        first = heads(selection, options.window_tokens, options.head_tokens, options.after_hole)
        shares = [(options.question_share, windows.ordered(-worth)), (options.head_share, first)]
        return one_after_another([side_by_side(shares, moved), heads(selection, options.window_tokens)])
