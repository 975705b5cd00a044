"""Prompts of random tokens: stored documents in new orders, and new text."""

from itertools import chain
from typing import NamedTuple

import numpy as np

from harness.engines import Engine


class Sizes(NamedTuple):
    documents: int = 7
    document_tokens: int = 512
    glue_tokens: int = 26
    """New text before each document."""
    question_tokens: int = 64
    vocabulary: int = 8000


class Texts:
    def __init__(self, seed: int, sizes: Sizes | None = None) -> None:
        self.sizes = sizes = sizes or Sizes()
        self._random = np.random.default_rng(seed)
        self.documents = [self.new(sizes.document_tokens) for _ in range(sizes.documents)]

    def new(self, n: int) -> list[int]:
        return [*self._random.integers(10, self.sizes.vocabulary - 10, n).tolist()]

    def question(self) -> list[int]:
        return self.new(self.sizes.question_tokens)

    def in_order(self) -> list[int]:
        return [*chain.from_iterable(self.documents), *self.question()]

    def pieces(self) -> list[list[int]]:
        """The documents in another order, with new text before each."""
        order = self._random.permutation(self.sizes.documents)
        return [self.new(self.sizes.glue_tokens) + self.documents[number] for number in order]

    def shuffled(self) -> list[int]:
        return [*chain.from_iterable(self.pieces()), *self.question()]

    def store(self, engine: Engine) -> None:
        for document in self.documents:
            engine.one(document, mode="exact")
