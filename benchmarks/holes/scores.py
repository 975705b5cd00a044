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
    return max((_f1(_words(answer), _words(one)) for one in right), default=0.0)


def rouge_l(answer: str, right: Sequence[str]) -> float:
    """F of the longest subsequence of words that both have, in lower case."""
    return max((_rouge_l(_all_words(answer), _all_words(one)) for one in right), default=0.0)


def _words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def _all_words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _f1(ours: Sequence[str], theirs: Sequence[str]) -> float:
    return _harmonic(sum((Counter(ours) & Counter(theirs)).values()), len(ours), len(theirs))


def _rouge_l(ours: Sequence[str], theirs: Sequence[str]) -> float:
    row = [0] * (len(theirs) + 1)
    for word in ours:
        before = 0
        for place, other in enumerate(theirs, 1):
            before, row[place] = row[place], before + 1 if word == other else max(row[place], row[place - 1])
    return _harmonic(row[-1], len(ours), len(theirs))


def _harmonic(common: int, ours: int, theirs: int) -> float:
    return 2 * common / (ours + theirs) if common else 0.0
