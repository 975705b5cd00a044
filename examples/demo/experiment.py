"""Prompts served in three ways in turn, so that whatever else the machine does meets all alike."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from benchmarks.quality.workloads import Tokens
from benchmarks.timing import progress
from blendhub.core.spans import Span
from blendhub.outcome.fates import Stretch, strip_of
from examples.demo.workload import Workload
from harness.engines import Answer, Engine

ANSWER_TOKENS = 8


class Way(msgspec.Struct, frozen=True):
    title: str
    asked: dict[str, Any]
    """What each request asks of BlendHub."""


WAYS = {
    "full": Way("full prefill", {"mode": "off"}),
    "blended": Way("blended", {}),
    "moved": Way("reused as is", {"recompute_ratio": 0.0}),
}


class Said(msgspec.Struct):
    """The answer to one question."""

    question: str
    answer: str
    first_token_s: float


class Measured(msgspec.Struct):
    """One prompt, served one way with each of its questions."""

    prompt: int
    way: str
    plan: list[Stretch]
    """The fate of each token when the first question was asked."""
    report: dict[str, Any]
    """The part of the first question's response that reports reuse."""
    said: list[Said] = []


def show(engine: Engine, workload: Workload) -> None:
    for prompt in progress(workload.earlier(), "show it every document once", sys.stdout):
        engine.one(prompt)


def measure(engine: Engine, workload: Workload) -> list[Measured]:
    """Ask about documents that were shown, to this engine or to another one of the fleet."""
    (another, _), *prompts = workload.later()
    # What happens for the first time takes longer: code is compiled, memory touched.
    for way in WAYS.values():
        _serve(engine, another, way)
    measured: dict[tuple[int, str], Measured] = {}
    turns = list(_turns([len(questions) for _, questions in prompts]))
    for number, asked, name in progress(turns, "ask in three ways", sys.stdout):
        body, questions = prompts[number]
        question = questions[asked]
        prompt = [*body, *question.tokens]
        answer = _serve(engine, prompt, WAYS[name])
        if asked == 0:
            measured[number, name] = Measured(number + 1, name, plan_of(len(prompt), answer.report), answer.report)
        said = Said(question.text, workload.words(answer.tokens), answer.first_token_s)
        measured[number, name].said.append(said)
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
    return engine.one(prompt, tokens=ANSWER_TOKENS, store=False, explain=True, **way.asked)
