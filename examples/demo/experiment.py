"""Prompts as retrieval makes them, served in four ways in turn, so that whatever else the machine does meets all alike.

The prompts are those of the small reader that answers them: words of a language with 288 of them, without a tokenizer.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
from rich.progress import Progress

from benchmarks.quality.reader.task import Prompt, Question, headers, make_prompt
from benchmarks.quality.workload import Case, Tokens, make_visits
from blendhub.core.spans import Span
from blendhub.outcome.fates import Stretch, strip_of
from harness.engines import Answer, Engine

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
        return make_visits(self._cases, headers(), LONGEST)

    def later(self) -> list[tuple[Tokens, list[Question]]]:
        """Prompts without a question, and the questions that are asked behind each."""
        return [(case.body, asked) for case, asked in zip(self._cases, self._questions, strict=True)]


def _choose(prompt: Prompt, seed: int, n: int) -> list[Question]:
    """Questions of each kind in turn, none twice."""
    asked = random.Random(seed).sample(prompt.questions, len(prompt.questions))
    kinds = ([one for one in asked if one.stratum == kind] for kind in ASKED)
    return [one for turn in zip_longest(*kinds) for one in turn if one][:n]


class Way(msgspec.Struct, frozen=True):
    title: str
    asked: dict[str, Any]
    """What each request asks of BlendHub."""


WAYS = {
    "full": Way("full prefill", {"mode": "off"}),
    "exact": Way("exact prefix", {"mode": "exact"}),
    "blended": Way("blended", {}),
    "moved": Way("reused as is", {"recompute_ratio": 0.0}),
}


class Measured(msgspec.Struct):
    """One prompt, served one way with each of its questions."""

    prompt: int
    way: str
    plan: list[Stretch]
    """The fate of each token when the first question was asked."""
    report: dict[str, Any]
    """The part of the first question's response that reports reuse."""
    first_token_s: list[float] = []
    right: list[bool] = []
    """Whether the answer to each question was."""


def show(engine: Engine, workload: Workload, progress: Progress) -> None:
    for prompt in progress.track(workload.earlier(), description="show it every document once"):
        engine.one(prompt)


def measure(engine: Engine, workload: Workload, progress: Progress) -> list[Measured]:
    """Ask about documents that were shown, to this engine or to another one of the fleet."""
    (another, _), *prompts = workload.later()
    # What happens for the first time takes longer: code is compiled, memory touched.
    for way in progress.track(WAYS.values(), description="warm up"):
        _serve(engine, another, way)
    measured: dict[tuple[int, str], Measured] = {}
    turns = list(_turns([len(questions) for _, questions in prompts]))
    for number, asked, name in progress.track(turns, description="ask in four ways"):
        body, questions = prompts[number]
        question = questions[asked]
        prompt = [*body, *question.tokens]
        answer = _serve(engine, prompt, WAYS[name])
        if asked == 0:
            measured[number, name] = Measured(number + 1, name, plan_of(len(prompt), answer.report), answer.report)
        measured[number, name].first_token_s.append(answer.first_token_s)
        measured[number, name].right.append(answer.tokens == [question.answer])
    return list(measured.values())


def plan_of(n_tokens: int, report: dict[str, Any]) -> list[Stretch]:
    """The fate of each token, from the response's report."""
    spans = msgspec.convert(report.get("spans", {}), dict[str, list[Span]])
    return strip_of(n_tokens, report["engine_tokens"], spans)


def _turns(questions: Sequence[int]) -> Iterator[tuple[int, int, str]]:
    """Prompt, question and way. Each question begins with another way."""
    names = list(WAYS)
    for number, n in enumerate(questions):
        for asked in range(n):
            begin = asked % len(names)
            yield from ((number, asked, name) for name in names[begin:] + names[:begin])


def _serve(engine: Engine, prompt: Tokens, way: Way) -> Answer:
    engine.forget()
    return engine.one(prompt, store=False, explain=True, **way.asked)
