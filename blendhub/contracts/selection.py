"""What a selector is asked: all that is known of one prompt before some of its reused tokens are computed again."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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

    Only ``moved`` and ``ratio`` must be given. Arrays that are left out are made as long as the prompt, of zeros. What
    ``pick`` gets is sound, and it changes nothing of it.
    """

    moved: Sequence[Span]
    """The reused tokens that stand elsewhere than where they were computed: disjoint, ascending, no span empty. Spans
    may touch: they come from different places, and a selector that picks by span treats each by itself."""
    ratio: float
    """From 0 to 1: the share of the moved tokens that may be picked."""
    block_tokens: int = 1
    """At least 1: the number of neighbours that the device prefers to compute together."""
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
    """The whole prompt."""

    def checked(self) -> "Selection":
        """The same with every array as long as the prompt; raises InvalidInput for what is not as described above.

        Whether ``scores`` and ``attended`` are needed is for the selector to say.
        """
        end = _checked_spans("moved", self.moved)
        end = max(end, _checked_spans("holes", self.holes))
        _check_apart(self.moved, self.holes)
        # Written so that a ratio that is not a number fails too.
        if not isinstance(self.ratio, int | float) or not 0 <= self.ratio <= 1:
            raise InvalidInput(f"ratio is {self.ratio!r}, but must be a number from 0 to 1")
        if not isinstance(self.block_tokens, int) or self.block_tokens < 1:
            raise InvalidInput(f"block_tokens is {self.block_tokens!r}, but must be an integer of at least 1")
        if not isinstance(self.question, Span) or (len(self.question) and self.question.start < end):
            raise InvalidInput(f"question is {self.question!r}, but must be a span that starts at {end} or later")
        _check_array("tokens", self.tokens, np.uint32)
        end = max(end, self.question.end)
        tokens = self.tokens if len(self.tokens) else np.zeros(end, np.uint32)
        if len(tokens) < end:
            raise InvalidInput(f"there are {len(tokens)} tokens, but spans up to {end}; give the whole prompt")
        return replace(self, tokens=tokens)


def described(value: object) -> str:
    """What errors call a value that should be an array."""
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__


def _checked_spans(name: str, spans: Sequence[Span]) -> int:
    """Where the last of the spans ends."""
    end = 0
    for span in spans:
        if not isinstance(span, Span):
            raise InvalidInput(f"{name} has {span!r} in it, but must hold spans only")
        if span.start < end or not len(span):
            raise InvalidInput(f"{name} has {span} in it, which must not be empty, and start at {end} or later")
        end = span.end
    return end


def _check_apart(moved: Sequence[Span], holes: Sequence[Span]) -> None:
    end = 0
    for span in sorted([*moved, *holes]) if holes else ():
        if span.start < end:
            raise InvalidInput(f"a hole and moved tokens overlap at {span.start}; a hole has no stored KV")
        end = span.end


def _check_array(name: str, array: object, dtype: type[np.generic]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        raise InvalidInput(f"{name} must be a {dtype.__name__} array of one dimension, got {described(array)}")
