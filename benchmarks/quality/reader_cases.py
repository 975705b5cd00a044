"""Cases of the reader's task: one column a stratum."""

import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import count

from benchmarks.quality.reader import task
from benchmarks.quality.reader.task import STRATA, Prompt, make_prompt
from benchmarks.quality.reader.words import WORDS
from benchmarks.quality.scores import f1, rouge_l
from benchmarks.quality.text_cases import score
from benchmarks.quality.workload import Case, Question, Tokens
from blendhub.tools.advice.judge import Scores

MOST_OF_A_PROMPT = 6
"""Questions of one stratum."""
OTHERS = 1_000_000
"""Seeds from here on make prompts of which only the headers are used."""


def make_prompts(questions: int, block_tokens: int) -> Iterator[tuple[Prompt, Case]]:
    """Test prompts with so many questions of each stratum in all.

    They end where a block of vLLM ends, so that all questions to a prompt can share its KV.
    """
    missing = Counter(dict.fromkeys(STRATA, questions))
    for seed in count():
        prompt = make_prompt(seed, "test")
        if (len(prompt.header) + sum(map(len, prompt.documents))) % block_tokens:
            continue
        rng, asked = random.Random(seed), list[task.Question]()
        for stratum in STRATA:
            of = [one for one in prompt.questions if one.stratum == stratum]
            asked += rng.sample(of, min(len(of), MOST_OF_A_PROMPT, missing[stratum]))
        if asked:
            missing.subtract(one.stratum for one in asked)
            questions_asked = [Question(one.tokens, partial(_score, one.answer, one.stratum)) for one in asked]
            yield prompt, Case(prompt.header, prompt.documents, questions_asked)
        if not any(missing.values()):
            return


def make_text_cases(number: int) -> list[Case]:
    """So many test prompts with one question each, whose answers are scored as text: by F1 and ROUGE-L.

    The first word counts: answers have one, and the reader has not learned to stop.
    """
    cases = []
    for seed in range(number):
        prompt = make_prompt(seed, "test")
        asked = random.Random(seed).choice(prompt.questions)
        right = WORDS[asked.answer]
        score_text = partial(score, _first_word, (f1, rouge_l), [right])
        cases.append(Case(prompt.header, prompt.documents, [Question(asked.tokens, score_text, (right,))]))
    return cases


def _first_word(answer: Tokens) -> str:
    """Models may have more tokens than there are words."""
    return "".join(WORDS[token] for token in answer[:1] if token < len(WORDS))


def headers() -> Iterator[Tokens]:
    """Headers of no prompt that is asked."""
    return (make_prompt(OTHERS + number, "train").header for number in count())


def _score(expected: int, stratum: str, answer: Tokens) -> Scores:
    right = float(answer[:1] == [expected])
    return [right if one == stratum else None for one in STRATA]
