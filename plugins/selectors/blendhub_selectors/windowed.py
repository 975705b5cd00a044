"""Selectors that pick whole windows, in an order that what is known of the prompt decides."""

from abc import abstractmethod
from math import ceil

import numpy as np
import numpy.typing as npt

from blendhub.contracts import Selection, Selector
from blendhub.plan import Span
from blendhub_selectors.options import CombinedOptions, LearnedOptions, QuestionOptions
from blendhub_selectors.question import question
from blendhub_selectors.signals import heads, learned, means, moved_mask, sensitivity_squared
from blendhub_selectors.windows import Mask, Windows, one_after_another, side_by_side


class WindowSelector(Selector):
    """Picks windows until the budget is used up. The order does not depend on the budget, so more of it only adds."""

    def __init__(self, rest_tokens: int) -> None:
        self._rest_tokens = rest_tokens

    @abstractmethod
    def order(self, selection: Selection, moved: Mask) -> Windows:
        """Windows, the best first. What they leave of the budget goes to the beginnings of spans."""

    def pick(self, selection: Selection) -> list[Span]:
        moved = moved_mask(selection)
        windows = one_after_another([self.order(selection, moved), heads(selection, self._rest_tokens)])
        return windows.within(ceil(selection.ratio * int(moved.sum())), moved)


class LearnedSelector(WindowSelector):
    """The beginnings of spans, and the tokens whose KV changed most when it was computed in another context."""

    def __init__(self, options: LearnedOptions) -> None:
        super().__init__(options.learned_tokens)
        self._options = options

    def order(self, selection: Selection, moved: Mask) -> Windows:
        changes = sensitivity_squared(selection, moved)
        return side_by_side(_known_before(selection, moved, changes, self._options), moved)


class QuestionSelector(WindowSelector):
    """The places of which the question speaks, before the beginnings of spans."""

    def __init__(self, options: QuestionOptions) -> None:
        super().__init__(options.question_tokens)
        self._options = options

    def order(self, selection: Selection, moved: Mask) -> Windows:
        windows, worth = question(selection, moved, self._options.question_tokens, self._options.question_before)
        return windows.ordered(-worth)


class CombinedSelector(WindowSelector):
    """Three signals share the budget: beginnings of spans, the question's words, and what was learned."""

    def __init__(self, options: CombinedOptions) -> None:
        super().__init__(options.learned_tokens)
        self._options = options

    def order(self, selection: Selection, moved: Mask) -> Windows:
        windows, worth = question(selection, moved, self._options.question_tokens, self._options.question_before)
        changes = sensitivity_squared(selection, moved)
        # What the question asks for is right as it is, where no context changes it.
        asked = windows.ordered(-worth * means(changes, windows))
        parts = [(self._options.question_share, asked), *_known_before(selection, moved, changes, self._options)]
        return side_by_side(parts, moved)


def _known_before(
    selection: Selection, moved: Mask, changes: npt.NDArray[np.float64], options: LearnedOptions
) -> list[tuple[float, Windows]]:
    """What can be known before the question comes: the signals of places and of learned bytes, with their shares."""
    places = heads(selection, options.learned_tokens, options.head_tokens, options.after_hole)
    # A beginning that is known to change less than other text needs not be computed for its place.
    first = places.where(means(changes, places) >= 1)
    changed = learned(selection, moved, options.learned_tokens, options.after_hole)
    return [(options.head_share, first), (options.learned_share, changed)]
