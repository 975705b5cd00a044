"""What a selector is asked: all that is known of one prompt before some of its reused tokens are computed again."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from blendhub.core.errors import InvalidInput
from blendhub.core.spans import Span
from blendhub.core.tokens import Tokens

Scores = npt.NDArray[np.float32]
NOTHING = Span(0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """One prompt, of which some tokens were reused. The same on all ranks of a tensor-parallel group.

    Only ``moved`` and ``ratio`` must be given. One that is not as described below cannot be made: that raises
    InvalidInput.
    """

    moved: Sequence[Span]
    """The reused tokens that stand elsewhere than where they were computed: disjoint, ascending, no span empty. Spans
    may touch: they come from different places, and a selector that picks by span treats each by itself."""
    ratio: float
    """From 0 to 1: the share of the moved tokens that may be picked."""
    block_tokens: int = 1
    """At least 1: the number of neighbours that are computed in about the time of one, those of a tile of the attention
    that computes them; 1: single tokens cost no more."""
    scores: Scores | None = None
    """``scores[p]`` belongs to position ``p`` of the prompt, at least up to the last moved one; None if ``probe_layer``
    is 0. The higher it is, the more is gained from picking ``p``; scores that are not finite count as the highest.
    Outside of ``moved`` scores mean nothing."""
    attended: Scores | None = None
    """How much the end of the prompt attends to each position: as ``scores``, of another kind. None if
    ``attended_layers`` is empty, or if the attention of the loaded model cannot be measured."""
    holes: Sequence[Span] = ()
    """What nothing stored covers and is computed in any case: disjoint, ascending, no span empty, none of it moved."""
    question: Span = NOTHING
    """The tail of the prompt that nothing stored covers: behind what moved and behind the holes. It may be empty."""
    tokens: Tokens = field(default_factory=lambda: np.empty(0, np.uint32))
    """The whole prompt. Where it is left out, zeros stand for it."""

    def __post_init__(self) -> None:
        end_of_moved = _end_of("moved", self.moved)
        end = max(end_of_moved, _end_of("holes", self.holes))
        if self.holes:
            _end_of("moved and holes together", sorted([*self.moved, *self.holes]))
        # Written so that a ratio that is not a number fails too.
        if not isinstance(self.ratio, int | float) or not 0 <= self.ratio <= 1:
            raise InvalidInput(f"ratio is {self.ratio!r}, but must be a number from 0 to 1")
        if not isinstance(self.block_tokens, int) or self.block_tokens < 1:
            raise InvalidInput(f"block_tokens is {self.block_tokens!r}, but must be an integer of at least 1")
        if not isinstance(self.question, Span) or (len(self.question) and self.question.start < end):
            raise InvalidInput(f"question is {self.question!r}, but must be a span that starts at {end} or later")
        end = max(end, self.question.end)
        if isinstance(self.tokens, np.ndarray) and not self.tokens.size:
            object.__setattr__(self, "tokens", np.zeros(end, np.uint32))
        _check_array("tokens", self.tokens, np.uint32, end)
        for name, measured in (("scores", self.scores), ("attended", self.attended)):
            if measured is not None:
                _check_array(name, measured, np.float32, end_of_moved)


def _end_of(name: str, spans: Sequence[Span]) -> int:
    """Where the last of the spans ends; raises unless they ascend."""
    end = 0
    for span in spans:
        if not isinstance(span, Span):
            raise InvalidInput(f"{name} has {span!r} in it, but must hold spans only")
        if span.start < end or not len(span):
            raise InvalidInput(f"{name} has {span} in it, which must not be empty, and start at {end} or later")
        end = span.end
    return end


def _check_array(name: str, array: object, dtype: type[np.generic], least: int) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        shape = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidInput(f"{name} must be a {dtype.__name__} array of one dimension, got {shape}")
    if len(array) < least:
        raise InvalidInput(f"{name} has {len(array)} numbers, but needs one for each of {least} positions")
