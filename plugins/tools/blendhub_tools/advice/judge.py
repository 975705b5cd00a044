"""How far answers are from full prefill's. Each says full prefill's own tokens, so that all can be compared at each."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

ANSWER_TOKENS = 16
LOGPROBS = 1000
"""The likely tokens whose log-probabilities vLLM returns."""

Scores: TypeAlias = list[float | None]
"""The scores of an answer, one for each column of a table; None where a question does not count in it."""

KL, ALL_KL, NATS, RIGHT_NATS, FIRST, SURE_FIRST, ANSWER, RIGHT = range(8)
"""Columns of scores: the KL of the first token, the mean KL of all tokens, the nats lost on full prefill's tokens, and
on the right answer; whether the first token is the same, also only where full prefill is surer than 0.5; whether all
tokens are the same; whether the answer is right. Right answers count only where full prefill gives them. What is lost
counts negative: more is better in all columns.
"""


class Answered(Protocol):
    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[Mapping[int, float]]:
        """For each token, the log-probabilities of the most likely ones."""


def judge(full: Answered, ours: Answered, right: int) -> Scores:
    """The scores of an answer to a question that was made to say the tokens of ``full``.

    ``right``: so many tokens of ``full`` give the right answer; 0 if it is wrong or not known.
    """
    lost = [
        before[token] - after[token]
        for token, before, after in zip(full.tokens, full.logprobs, ours.logprobs, strict=True)
    ]
    apart = [divergence(*both) for both in zip(full.logprobs, ours.logprobs, strict=True)]
    same = [_likeliest(after) == token for token, after in zip(full.tokens, ours.logprobs, strict=True)]
    return [
        -apart[0],
        -sum(apart) / len(apart),
        -sum(lost),
        -sum(lost[:right]) if right else None,
        float(same[0]),
        float(same[0]) if full.logprobs[0][full.tokens[0]] > math.log(0.5) else None,
        float(all(same)),
        float(all(same[:right])) if right else None,
    ]


def divergence(full: Mapping[int, float], ours: Mapping[int, float]) -> float:
    """The KL of two distributions, given by the log-probabilities of likely tokens; all others count as one token."""
    common = full.keys() & ours.keys()
    known = sum(math.exp(full[token]) * (full[token] - ours[token]) for token in common)
    rest, our_rest = (_rest([those[token] for token in common]) for those in (full, ours))
    return known + rest * math.log(rest / our_rest)


def _rest(logprobs: Sequence[float]) -> float:
    return max(1e-9, 1 - sum(map(math.exp, logprobs)))


def _likeliest(logprobs: Mapping[int, float]) -> int:
    return max(logprobs, key=logprobs.__getitem__)
