"""What engines answer, and how far two answers differ."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

KV = npt.NDArray[np.float32]


class Answer:
    """What an engine answered to one prompt."""

    def __init__(self, call: Callable[..., Any], answer: dict[str, Any]) -> None:
        """``call`` calls a method of the engine's host."""
        self._call = call
        self.id: str = answer["id"]
        self.tokens: list[int] = answer["tokens"]
        self.logprobs: list[dict[int, float]] = answer["logprobs"]
        """For each token, the log-probabilities of the most likely ones, 20 unless more were asked for."""
        self.report: dict[str, Any] = answer["report"]
        """BlendHub's report."""
        self.transfer: dict[str, Any] = answer["transfer"]
        """What all connectors told with the answer."""
        self.cached: int = answer["cached"]
        """How many of the prompt's tokens vLLM did not compute."""
        self.first_token_s: float = answer["first_token_s"]
        self.ended_s: float = answer["ended_s"]
        """After which time the answer was whole, of prompts that were asked with ``ask``."""

    def kv(self, n: int) -> KV:
        """``[layers, 2, n, heads, width]`` of the prompt's first tokens; ask before other prompts need the blocks."""
        kv: KV = self._call("kv", self.id, n)
        return kv

    def states(self) -> list[KV]:
        """The parts of the states of recurrent layers at the answer's end; ask as for ``kv``."""
        states: list[KV] = self._call("states", self.id)
        return states


class Beside(NamedTuple):
    """What an engine answered to one prompt while it answered others."""

    answer: Answer
    stream: Answer | None
    """The answer to the first of the others, if it is whole."""
    gaps_s: list[float]
    """Between the tokens of that one, after the prompt was asked."""

    @property
    def longest_gap_s(self) -> float:
        return max(self.gaps_s, default=0.0)


def deviation(kv: KV, expected: KV) -> float:
    """The distance of KV from the expected KV, relative to the size of the latter."""
    return float(np.linalg.norm(kv - expected) / np.linalg.norm(expected))


def largest_difference(kv: KV, expected: KV) -> float:
    """The largest difference of a number, relative to the largest number."""
    return float(np.abs(kv - expected).max() / np.abs(expected).max())


def disagreement(answers: Sequence[Answer], expected: Sequence[Answer]) -> float:
    """The largest difference of a likely token's log-probability, as far as answers continue the same text.

    Tokens themselves are equal only between engines of the same kind, asked one prompt after the other: where two are
    almost equally likely, rounding decides, and the rest of the two answers cannot be compared.
    """
    return max(_disagreement(*pair) for pair in zip(answers, expected, strict=True))


def _disagreement(answer: Answer, expected: Answer) -> float:
    worst = 0.0
    for ours, theirs, token, other in zip(
        answer.logprobs, expected.logprobs, answer.tokens, expected.tokens, strict=True
    ):
        likely = {*_most_likely(ours), *_most_likely(theirs)}
        worst = max(worst, *(abs(ours.get(t, -math.inf) - theirs.get(t, -math.inf)) for t in likely))
        if token != other:
            break
    return worst


def _most_likely(logprobs: dict[int, float]) -> list[int]:
    """Half of those known: the others may be missing where rounding decides which are known."""
    return sorted(logprobs, key=logprobs.__getitem__, reverse=True)[: len(logprobs) // 2]
