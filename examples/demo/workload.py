"""Prompts as retrieval makes them: a system prompt, documents in the order a search ranked them, a new question.

No tokenizer takes part: token ids are drawn at random, and a document is the same ids wherever it stands.
"""

from collections.abc import Sequence

import numpy as np

N_DOCUMENTS = 12
LONGEST = 4096
Tokens = list[int]


class Workload:
    """Earlier prompts show each document once; later ones show the same documents in new orders, with new glue."""

    def __init__(self, vocabulary: int, seed: int = 1) -> None:
        self._vocabulary = vocabulary
        self._random = np.random.default_rng(seed)
        self.system = self._text(200)
        self._documents = [self._text(self._any(450, 700)) for _ in range(N_DOCUMENTS)]

    def earlier(self) -> list[Tokens]:
        return [self._prompt(range(first, first + 3)) for first in range(0, N_DOCUMENTS, 3)]

    def later(self, n: int) -> list[Tokens]:
        return [self._prompt(self._random.permutation(N_DOCUMENTS)[: self._any(4, 5)].tolist()) for _ in range(n)]

    def _prompt(self, ranked: Sequence[int]) -> Tokens:
        prompt = [*self.system, *self._documents[ranked[0]]]
        for document in ranked[1:]:
            prompt += self._text(self._any(10, 40)) + self._documents[document]
        return prompt + self._text(self._any(20, 60))

    def _text(self, length: int) -> Tokens:
        fresh: Tokens = self._random.integers(0, self._vocabulary, length).tolist()
        return fresh

    def _any(self, least: int, most: int) -> int:
        return int(self._random.integers(least, most, endpoint=True))
