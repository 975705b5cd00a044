"""Where the moved text speaks of what the question asks for: the question's rare words, found again."""

import msgspec
import numpy as np
import numpy.typing as npt

from blendhub.contracts import Selection
from blendhub.core.tokens import Tokens
from blendhub_selectors.windows import Mask, Windows

LONGEST = 128
"""The length of the question's end that is used; before it, a longer tail has text that was never stored."""
COMMON = 1 / 16
"""A token that makes up this share of the prompt, or more, says nothing about where the answer is."""
TEMPLATE_TOKENS, TEMPLATE_TIMES = 3, 3
"""A beginning or an end of the tail is a template if it has so many tokens, and stands in the prompt so many times."""

FRONT = 1.5
"""What stands before all documents is the question if it shares more rare words with them than the tail does, and so
many times as many for its length. A template has few of them, and other new text has them far apart."""

Numbers = npt.NDArray[np.int64]
Worths = npt.NDArray[np.float64]


def question(selection: Selection, moved: Mask, width: int, before: int) -> tuple[Windows, Worths]:
    """A window around each rare token of the question that stands in moved text, and its worth.

    It holds ``before`` tokens before that token, and ``width`` from it on.

    A window is worth the more, the more different ones of these tokens it holds, the rarer they are in the prompt, and
    the earlier they stand in it: so that what follows them is in it too. There are no windows if the question stands
    before the moved text, or if the tail is but a template: the words of such a tail stand in the text by chance.
    """
    text = selection.tokens[: selection.question.start]
    moved = moved[: len(text)]
    tail, front = _asked(selection, text), _before_moved(selection)
    asked, ahead = (_RareTokens.of(tokens, text, moved) for tokens in (tail, front))
    if ahead.worth > asked.worth and ahead.worth * len(tail) > FRONT * asked.worth * len(front):
        return Windows.at(np.empty(0, np.int64), width, len(text)), np.empty(0)
    return _found(np.where(moved, asked.numbers(text), -1), asked.weights, width, before)


class _RareTokens(msgspec.Struct, frozen=True, eq=False):
    """Tokens that stand in moved text and are rare in the prompt: ascending, each with a weight above 0."""

    tokens: Tokens
    weights: Worths

    @classmethod
    def of(cls, tokens: Tokens, text: Tokens, moved: Mask) -> "_RareTokens":
        every = cls(np.unique(tokens), np.empty(0))
        numbers = every.numbers(text)
        in_text, in_moved = (
            np.bincount(some[some >= 0], minlength=len(every.tokens)) for some in (numbers, numbers[moved])
        )
        weights = np.log(COMMON * max(len(text), 1) / np.maximum(in_text, 1))
        rare = (in_moved > 0) & (weights > 0)
        return cls(every.tokens[rare], weights[rare])

    @property
    def worth(self) -> float:
        return float(self.weights.sum())

    def numbers(self, text: Tokens) -> Numbers:
        """For each place of a text, the number of the token that stands there; -1 for other tokens."""
        if not len(self.tokens):
            return np.full(len(text), -1)
        number = np.minimum(np.searchsorted(self.tokens, text), len(self.tokens) - 1)
        return np.where(self.tokens[number] == text, number, -1)


def _asked(selection: Selection, text: Tokens) -> Tokens:
    """The tokens of the question, without what is a template at its beginning and at its end."""
    tail = selection.tokens[selection.question.start : selection.question.end][-LONGEST:]
    tail = tail[_template_tokens(tail, text) :]
    return tail[: len(tail) - _template_tokens(tail[::-1], text[::-1])]


def _template_tokens(tail: Tokens, text: Tokens) -> int:
    """The length of the template that the tail begins with; 0 if it begins with none."""
    n = 0
    places = np.arange(len(text))
    while n < len(tail):
        places = places[places + n < len(text)]
        places = places[text[places + n] == tail[n]]
        if len(places) < TEMPLATE_TIMES:
            break
        n += 1
    return n if n >= TEMPLATE_TOKENS else 0


def _before_moved(selection: Selection) -> Tokens:
    """The text before all moved text that was never stored, if it is no longer than a question."""
    first = selection.moved[0].start if selection.moved else 0
    tokens = [selection.tokens[hole.start : hole.end] for hole in selection.holes if hole.end <= first]
    together = np.concatenate([selection.tokens[:0], *tokens])
    return together if len(together) <= LONGEST else together[:0]


def _found(numbers: Numbers, weights: Worths, width: int, before: int) -> tuple[Windows, Worths]:
    """A window around each place where one of the tokens stands, and its worth."""
    starts = np.flatnonzero(numbers >= 0)
    places = starts[:, None] + np.arange(width)
    inside = np.append(numbers, np.full(width, -1))[places]
    # The number -1 is the last one's.
    weight = np.append(weights, 0.0)
    worth = np.zeros(len(starts))
    for offset in range(width):
        is_new = (inside[:, :offset] != inside[:, offset : offset + 1]).all(1)
        worth += is_new * weight[inside[:, offset]] * (width - offset) / width
    return Windows(np.maximum(starts - before, 0), np.minimum(starts + width, len(numbers))), worth
