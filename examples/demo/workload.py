"""Prompts as retrieval makes them: English documents, and questions about single ones to the model that others trained.

The people in the documents never lived, so the model can know them only from its prompt.
"""

import random
import re
from itertools import islice
from typing import Any, NamedTuple

from benchmarks.quality.people import people
from benchmarks.quality.workloads import ONE_WORD, Case, Chat, Tokens, case_of, visits

DOCUMENTS = 7
"""How many a prompt has."""


class Question(NamedTuple):
    text: str
    tokens: Tokens
    """The end of the prompt, behind the documents."""


class Workload:
    """Earlier prompts show each document among others; later ones bring some together and ask about them."""

    def __init__(self, tokenizer: Any, n_prompts: int, n_questions: int) -> None:
        self._tokenizer = tokenizer
        chat, rng = Chat(tokenizer), random.Random(0)
        everyone = people(rng, "test")
        self._cases: list[Case] = []
        self._questions: list[list[Question]] = []
        # The first prompt is for warming up.
        for _ in range(1 + n_prompts):
            persons = list(islice(everyone, DOCUMENTS))
            all_asked = [asked for person in persons for asked in person.questions]
            asked = rng.sample(all_asked, min(n_questions, len(all_asked)))
            case = case_of(chat, ONE_WORD, [f"Document: {person.text}\n\n" for person in persons], asked)
            self._cases.append(case)
            self._questions.append(
                [Question(one.question, asks.tokens) for one, asks in zip(asked, case.questions, strict=True)]
            )

    def earlier(self) -> list[Tokens]:
        return visits(self._cases)

    def later(self) -> list[tuple[Tokens, list[Question]]]:
        """Prompts without a question, and the questions that are asked behind each."""
        return [(case.body, asked) for case, asked in zip(self._cases, self._questions, strict=True)]

    def words(self, answer: Tokens) -> str:
        """An answer up to its first comma or full stop."""
        text: str = self._tokenizer.decode(answer, skip_special_tokens=True)
        return re.split(r"[.,\n]", text)[0].strip()
