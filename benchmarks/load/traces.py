"""Prompts of documents that were seen before, as traces: lists of pieces that vLLM's client makes tokens of."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

PIECE_TOKENS = 20
DOCUMENTS = 14
Prompt = list[int]
"""The numbers of a prompt's pieces. A number stands for the same tokens in every trace."""


class Load(NamedTuple):
    prompts: list[Prompt]
    answer_tokens: int

    def write(self, path: Path) -> Path:
        with path.open("w") as file:
            for prompt in self.prompts:
                lengths = {"input_length": PIECE_TOKENS * len(prompt), "output_length": self.answer_tokens}
                file.write(json.dumps({"timestamp": 0, **lengths, "hash_ids": prompt}) + "\n")
        return path


class Traces:
    """Documents, and text that nobody has seen before."""

    def __init__(self, document_tokens: int) -> None:
        self._random, self._next = np.random.default_rng(0), 0
        self.documents = [self._new(document_tokens) for _ in range(DOCUMENTS)]

    def _new(self, n_tokens: int) -> Prompt:
        """Text of about so many tokens, at least a piece."""
        first = self._next
        self._next += max(1, n_tokens // PIECE_TOKENS)
        return list(range(first, self._next))

    def alone(self) -> Load:
        """Each document as a prompt, which has it stored."""
        return Load(self.documents, 1)

    def moved(self, n_prompts: int, n_documents: int, answer_tokens: int) -> Load:
        """Documents in new orders behind a novel beginning, which keeps the first from being an exact prefix, and
        before a novel question."""
        prompts = []
        for _ in range(n_prompts):
            chosen = self._random.permutation(DOCUMENTS)[:n_documents]
            pieces = [piece for number in chosen for piece in self.documents[number]]
            prompts.append([*self._new(PIECE_TOKENS), *pieces, *self._new(PIECE_TOKENS)])
        return Load(prompts, answer_tokens)

    def novel(self, n_prompts: int, n_tokens: int, answer_tokens: int) -> Load:
        """Prompts that share nothing."""
        return Load([self._new(n_tokens) for _ in range(n_prompts)], answer_tokens)
