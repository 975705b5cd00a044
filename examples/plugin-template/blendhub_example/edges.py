"""A selector in one file: the first and the last tokens of every moved span.

The first ones miss the text before them most. What follows the span attends to the last ones most.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from blendhub import Span
from blendhub.contracts import Selector
from blendhub.errors import InvalidInput


class EdgesOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    k: Annotated[int, msgspec.Meta(ge=1, le=65536, description="tokens at each end of a moved span")] = 16


class EdgesSelector(Selector):
    def __init__(self, options: EdgesOptions) -> None:
        self._k = options.k

    def select(
        self,
        moved: Sequence[Span],
        ratio: float,
        block_tokens: int = 1,
        scores: npt.NDArray[np.float32] | None = None,
    ) -> list[Span]:
        _check(moved, ratio, block_tokens, scores)
        if ratio == 0:
            return []
        return _joined(moved if ratio == 1 else [edge for span in moved for edge in self._edges(span)])

    def _edges(self, span: Span) -> list[Span]:
        if len(span) <= 2 * self._k:
            return [span]
        return [Span(span.start, span.start + self._k), Span(span.end - self._k, span.end)]


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Ascending spans with those that touch made one."""
    made: list[Span] = []
    for span in spans:
        start = made.pop().start if made and made[-1].end == span.start else span.start
        made.append(Span(start, span.end))
    return made


def _check(moved: Sequence[Span], ratio: float, block_tokens: int, scores: npt.NDArray[np.float32] | None) -> None:
    end = 0
    for span in moved:
        if not isinstance(span, Span) or not len(span) or span.start < end:
            raise InvalidInput(f"moved has {span!r} in it, but must hold spans that are not empty and ascend")
        end = span.end
    # Written so that a ratio that is not a number fails too.
    if not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise InvalidInput(f"ratio is {ratio!r}, but must be a number from 0 to 1")
    if not isinstance(block_tokens, int) or block_tokens < 1:
        raise InvalidInput(f"block_tokens is {block_tokens!r}, but must be an integer of at least 1")
    if scores is not None:
        raise InvalidInput("edges asks for no probe, but was given scores; leave them out")
