"""Cases of the reader's task, scored as text."""

import random
from functools import partial

from benchmarks.holes.texts import score
from benchmarks.quality.reader.task import make_prompt
from benchmarks.quality.reader.words import WORDS
from benchmarks.quality.workload import Case, Question, Tokens


def make_cases(number: int) -> list[Case]:
    """So many test prompts with one question each.

    The first word counts: answers have one, and the reader has not learned to stop.
    """
    cases = []
    for seed in range(number):
        prompt = make_prompt(seed, "test")
        asked = random.Random(seed).choice(prompt.questions)
        right = (WORDS[asked.answer],)
        cases.append(
            Case(prompt.header, prompt.documents, [Question(asked.tokens, partial(score, _first_word, right), right)])
        )
    return cases


def _first_word(answer: Tokens) -> str:
    """Models may have more tokens than there are words."""
    return "".join(WORDS[token] for token in answer[:1] if token < len(WORDS))
