"""Prompts as retrieval makes them: documents that were seen before, among others, and questions about them.

The people in the documents never lived, so the model can know them only from its prompt.
"""

import re
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from benchmarks.quality.people import TextQuestion
from benchmarks.quality.workloads import ONE_WORD, Case, Chat, biographies, case_of, visits
from benchmarks.timing import progress
from blendhub.core.spans import Span
from blendhub.outcome.fates import Stretch, strip_of
from harness.engines import Answer as EngineAnswer
from harness.engines import Engine

ANSWER_TOKENS = 8
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full prefill", {"mode": "off"}),
    "blended": ("blended", {}),
    "moved": ("reused as is", {"recompute_ratio": 0.0}),
}
"""The title of each way, and what its requests ask of BlendHub."""


class Prompt(NamedTuple):
    """Documents, and the questions that are asked behind them."""

    case: Case
    questions: list[TextQuestion]


class Answer(msgspec.Struct):
    """The answer to one question, asked in one way."""

    prompt: int
    question: str
    way: str
    answer: str
    first_token_s: float
    plan: list[Stretch]
    """The fate of each token of the prompt."""


def make_prompts(tokenizer: Any, n_prompts: int, n_questions: int) -> list[Prompt]:
    """One more than asked for: the first is for warming up."""
    prompts = []
    for documents, questions in islice(biographies("test"), 1 + n_prompts):
        asked = questions[:n_questions]
        prompts.append(Prompt(case_of(Chat(tokenizer), ONE_WORD, documents, asked), asked))
    return prompts


def show_documents(engine: Engine, prompts: Sequence[Prompt]) -> None:
    earlier = visits([prompt.case for prompt in prompts])
    for tokens in progress(earlier, "show it every document once", sys.stdout):
        engine.one(tokens)


def ask_all(engine: Engine, prompts: Sequence[Prompt], tokenizer: Any) -> list[Answer]:
    """Ask each question in three ways in turn, so that whatever else the machine does meets all alike."""
    warm_up, *asked = prompts
    # What happens for the first time takes longer: code is compiled, memory touched.
    for way in WAYS:
        _ask(engine, warm_up.case.body, way)
    ways, answers = list(WAYS), []
    # Each question begins with another way.
    turns = [
        (number, place, ways[(place + turn) % len(ways)])
        for number, prompt in enumerate(asked)
        for place in range(len(prompt.questions))
        for turn in range(len(ways))
    ]
    for number, place, way in progress(turns, "ask in three ways", sys.stdout):
        case, questions = asked[number]
        tokens = [*case.body, *case.questions[place].tokens]
        answer = _ask(engine, tokens, way)
        spans = msgspec.convert(answer.report.get("spans", {}), dict[str, list[Span]])
        plan = strip_of(len(tokens), answer.report["engine_tokens"], spans)
        # Up to the first comma or full stop.
        words = re.split(r"[.,\n]", tokenizer.decode(answer.tokens, skip_special_tokens=True))[0].strip()
        answers.append(Answer(number + 1, questions[place].question, way, words, answer.first_token_s, plan))
    return answers


def _ask(engine: Engine, tokens: list[int], way: str) -> EngineAnswer:
    engine.forget()
    return engine.one(tokens, tokens=ANSWER_TOKENS, store=False, explain=True, **WAYS[way][1])
