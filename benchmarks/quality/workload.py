"""The prompts that are asked, made of documents, and other prompts in which these documents were computed before."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Tokens: TypeAlias = list[int]


class Scores(NamedTuple):
    """The scores of an answer as text."""

    f1: float
    rouge_l: float


@dataclass(frozen=True)
class Question:
    tokens: Tokens
    score: Callable[[Tokens], Scores]
    """The scores of an answer."""
    right: tuple[str, ...] = ()
    """The right answers."""


@dataclass(frozen=True)
class Case:
    """A prompt, and the questions that are asked behind it, each alone."""

    header: Tokens
    documents: list[Tokens]
    questions: list[Question]

    @property
    def body(self) -> Tokens:
        """The tokens before the question."""
        return [*self.header, *(token for document in self.documents for token in document)]


def make_visits(cases: Sequence[Case], headers: Iterator[Tokens], longest: int, seed: str = "visits") -> list[Tokens]:
    """Prompts, each behind one of ``headers``, in which every document stands once, among those of other cases.

    Another ``seed`` gives the documents other neighbours.
    """
    rng = random.Random(seed)
    slots = max(len(case.documents) for case in cases)
    # A document goes so many cases further: neighbours part, and each finds those of other cases at its new place.
    further = [1 + number % max(1, len(cases) - 1) for number in range(slots)]
    rng.shuffle(further)
    together: list[list[Tokens]] = [[] for _ in cases]
    for home, case in enumerate(cases):
        for number, document in enumerate(case.documents):
            together[(home + further[number]) % len(cases)].append(document)
    visits: list[Tokens] = []
    for documents in together:
        rng.shuffle(documents)
        visit: Tokens = []
        for document in documents:
            if not visit or len(visit) + len(document) > longest:
                visits.append(visit := [*next(headers)])
            visit += document
    return visits
