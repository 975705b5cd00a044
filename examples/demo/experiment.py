"""Prompts served in three ways in turn, so that whatever else the machine does meets all alike."""

import sys
from typing import Any

import msgspec

from benchmarks.timing import progress
from blendhub.core.spans import Span
from blendhub.outcome.fates import Stretch, strip_of
from examples.demo.workload import Workload
from harness.engines import Answer, Engine

ANSWER_TOKENS = 8
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full prefill", {"mode": "off"}),
    "blended": ("blended", {}),
    "moved": ("reused as is", {"recompute_ratio": 0.0}),
}
"""The title of each way, and what its requests ask of BlendHub."""


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
    said: list[Said] = []


def show(engine: Engine, workload: Workload) -> None:
    for prompt in progress(workload.earlier(), "show it every document once", sys.stdout):
        engine.one(prompt)


def measure(engine: Engine, workload: Workload) -> list[Measured]:
    """Ask about documents that were shown, to this engine or to another one of the fleet."""
    (another, _), *prompts = workload.later()
    # What happens for the first time takes longer: code is compiled, memory touched.
    for way in WAYS:
        _serve(engine, another, way)
    measured: dict[tuple[int, str], Measured] = {}
    asked = [(number, place) for number, (_, questions) in enumerate(prompts) for place in range(len(questions))]
    names = list(WAYS)
    # Each question begins with another way.
    turns = [(*pair, names[(pair[1] + turn) % len(names)]) for pair in asked for turn in range(len(names))]
    for number, place, way in progress(turns, "ask in three ways", sys.stdout):
        body, questions = prompts[number]
        prompt = [*body, *questions[place].tokens]
        answer = _serve(engine, prompt, way)
        if place == 0:
            spans = msgspec.convert(answer.report.get("spans", {}), dict[str, list[Span]])
            plan = strip_of(len(prompt), answer.report["engine_tokens"], spans)
            measured[number, way] = Measured(number + 1, way, plan)
        said = Said(questions[place].text, workload.words(answer.tokens), answer.first_token_s)
        measured[number, way].said.append(said)
    return list(measured.values())


def _serve(engine: Engine, prompt: list[int], way: str) -> Answer:
    engine.forget()
    return engine.one(prompt, tokens=ANSWER_TOKENS, store=False, explain=True, **WAYS[way][1])
