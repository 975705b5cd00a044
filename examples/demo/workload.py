"""Prompts as retrieval makes them: documents seen before, in a new order, and questions to what they say together.

They are those of the small reader that answers them: words of a language with 288 of them, so no tokenizer takes part.
"""

import random
from itertools import zip_longest

from benchmarks.quality.reader.task import Prompt, Question, make_prompt
from benchmarks.quality.reader_cases import headers
from benchmarks.quality.workload import Case, Tokens, make_visits

LONGEST = 2048
ASKED = ("plain", "local", "cross", "split", "chained", "alias")
"""The kinds of questions: for a fact that a document states alone, or for one that other documents settle."""


class Workload:
    """Earlier prompts show each document among others; later ones bring some together and ask about them."""

    def __init__(self, n_prompts: int, n_questions: int) -> None:
        # The first prompt is for warming up.
        made = [make_prompt(seed, "test") for seed in range(1 + n_prompts)]
        self._cases = [Case(one.header, one.documents, []) for one in made]
        self._questions = [_choose(one, seed, n_questions) for seed, one in enumerate(made)]

    def earlier(self) -> list[Tokens]:
        return make_visits(self._cases, headers(1), LONGEST, seed=1)

    def later(self) -> list[tuple[Tokens, list[Question]]]:
        """Prompts without a question, and the questions that are asked behind each."""
        return [(case.body, asked) for case, asked in zip(self._cases, self._questions, strict=True)]


def _choose(prompt: Prompt, seed: int, n: int) -> list[Question]:
    """Questions of each kind in turn, none twice."""
    asked = random.Random(seed).sample(prompt.questions, len(prompt.questions))
    kinds = ([one for one in asked if one.stratum == kind] for kind in ASKED)
    return [one for turn in zip_longest(*kinds) for one in turn if one][:n]
