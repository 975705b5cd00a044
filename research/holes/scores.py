"""Scores of a written answer against the right ones, as question answering publishes them; the best of several counts.

A blank answer scores 0.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1(answer: str, right: Sequence[str]) -> float:
    """The F1 of the words of an answer and of the right ones, without articles and punctuation."""

    def words(text: str) -> Counter[str]:
        return Counter(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())

    said = words(answer)
    return max(
        (_harmonic((said & each).total(), said.total(), each.total()) for each in map(words, right)), default=0.0
    )


def rouge_l(answer: str, right: Sequence[str]) -> float:
    """F of the longest subsequence of words that both have, in lower case."""
    said, *others = (re.findall(r"\w+", text.lower()) for text in (answer, *right))
    return max((_harmonic(_common(said, words), len(said), len(words)) for words in others), default=0.0)


def _common(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(theirs) + 1)
    for word in ours:
        before = 0
        for place, other in enumerate(theirs, 1):
            before, row[place] = row[place], before + 1 if word == other else max(row[place], row[place - 1])
    return row[-1]


def _harmonic(common: int, ours: int, theirs: int) -> float:
    return 2 * common / (ours + theirs) if common else 0.0
