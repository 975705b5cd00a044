"""The beginnings of spans, by a rule that leaves nothing to rank."""

from math import ceil

from blendhub.contracts import Selection, Selector
from blendhub.core.spans import Span
from blendhub_selectors.options import FirstKOptions
from blendhub_selectors.signals import heads, moved_mask


class FirstKSelector(Selector):
    """The beginning of every span: its tokens lack most of what they would now attend to."""

    def __init__(self, options: FirstKOptions) -> None:
        self._k = options.k

    def select(self, selection: Selection) -> list[Span]:
        if selection.ratio == 0:
            return []
        if selection.ratio == 1:
            return list(selection.moved)
        if not self._k:
            moved = moved_mask(selection)
            return heads(selection, 1).within(ceil(selection.ratio * int(moved.sum())), moved)
        return [Span(span.start, min(span.end, span.start + self._k)) for span in selection.moved]
