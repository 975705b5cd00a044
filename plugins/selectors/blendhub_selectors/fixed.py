"""Selectors that decide from the plan alone, by a rule that leaves nothing to rank."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from blendhub.contracts import Selector
from blendhub.plan import Span
from blendhub_selectors.blocks import Blocks
from blendhub_selectors.checking import check_input
from blendhub_selectors.options import FirstKOptions


class AllSelector(Selector):
    """Everything, whatever the ratio."""

    def select(
        self,
        moved: Sequence[Span],
        ratio: float,
        block_tokens: int = 1,
        scores: npt.NDArray[np.float32] | None = None,
    ) -> list[Span]:
        check_input(self, moved, ratio, block_tokens, scores)
        return Blocks.of(moved).joined()


class NoneSelector(Selector):
    """Nothing, whatever the ratio."""

    def select(
        self,
        moved: Sequence[Span],
        ratio: float,
        block_tokens: int = 1,
        scores: npt.NDArray[np.float32] | None = None,
    ) -> list[Span]:
        check_input(self, moved, ratio, block_tokens, scores)
        return []


class FirstKSelector(Selector):
    """The beginning of every span: its tokens lack most of what they would now attend to."""

    def __init__(self, options: FirstKOptions) -> None:
        self._k = options.k

    def select(
        self,
        moved: Sequence[Span],
        ratio: float,
        block_tokens: int = 1,
        scores: npt.NDArray[np.float32] | None = None,
    ) -> list[Span]:
        check_input(self, moved, ratio, block_tokens, scores)
        if ratio == 0:
            return []
        spans = Blocks.of(moved)
        return (spans if ratio == 1 else spans.up_to(self._k)).joined()
