"""Selectors that decide from the plan alone, by a rule that leaves nothing to rank."""

from collections.abc import Sequence

from blendhub.contracts.selector import Scores, Selector
from blendhub.plan import Span
from blendhub_selectors.options import FirstKOptions


class AllSelector(Selector):
    """Everything, whatever the ratio."""

    def pick(self, moved: Sequence[Span], ratio: float, block_tokens: int, scores: Scores | None) -> list[Span]:
        return list(moved)


class NoneSelector(Selector):
    """Nothing, whatever the ratio."""

    def pick(self, moved: Sequence[Span], ratio: float, block_tokens: int, scores: Scores | None) -> list[Span]:
        return []


class FirstKSelector(Selector):
    """The beginning of every span: its tokens lack most of what they would now attend to."""

    def __init__(self, options: FirstKOptions) -> None:
        self._k = options.k

    def pick(self, moved: Sequence[Span], ratio: float, block_tokens: int, scores: Scores | None) -> list[Span]:
        if ratio == 0:
            return []
        if ratio == 1:
            return list(moved)
        return [Span(span.start, min(span.end, span.start + self._k)) for span in moved]
