"""How far answers are from full prefill's. Each says full prefill's own tokens, so that all can be compared at each."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

ANSWER_TOKENS = 16
LOGPROBS = 1000
"""The likely tokens whose log-probabilities vLLM returns."""

Scores: TypeAlias = list[float | None]
"""The scores of an answer, one for each column of a table; None where a question does not count in it."""

KL, NATS, FIRST, SURE_FIRST, ANSWER, RIGHT = range(6)
"""Columns of scores: the KL of the first token, and the nats lost on full prefill's tokens; whether the first token is
the same, also only where full prefill is surer than 0.5; whether all tokens are the same; whether the answer is right.
Right answers count only where full prefill gives them. What is lost counts negative: more is better in all columns.
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
    at_each = list(zip(full.tokens, full.logprobs, ours.logprobs, strict=True))
    same = [max(after, key=after.__getitem__) == token for token, _, after in at_each]
    return [
        -divergence(full.logprobs[0], ours.logprobs[0]),
        -sum(before[token] - after[token] for token, before, after in at_each),
        float(same[0]),
        float(same[0]) if full.logprobs[0][full.tokens[0]] > math.log(0.5) else None,
        float(all(same)),
        float(all(same[:right])) if right else None,
    ]


def divergence(full: Mapping[int, float], ours: Mapping[int, float]) -> float:
    """The KL of two distributions, given by the log-probabilities of likely tokens; all others count as one token."""
    common = full.keys() & ours.keys()
    kl = sum(math.exp(full[token]) * (full[token] - ours[token]) for token in common)
    rest, our_rest = (max(1e-9, 1 - sum(math.exp(one[token]) for token in common)) for one in (full, ours))
    return kl + rest * math.log(rest / our_rest)
