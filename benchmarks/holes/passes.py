"""The procedure: documents are computed, vLLM's own cache is emptied, one pass fills the holes, one only reuses."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from benchmarks.holes.order import Prompt
from benchmarks.quality.measure import Answering
from benchmarks.report import Row, row
from engine_harness import Answer, Engine

Method: TypeAlias = Literal["blend", "reuse", "full", "contiguous"]
Submit: TypeAlias = Literal["all", "one"]
PHASES = ("lookup", "load", "probe", "recompute", "save")
Steps: TypeAlias = Callable[[Sequence[Any], str], Iterator[Any]]


class Procedure(msgspec.Struct, frozen=True):
    method: Method
    ratio: float
    submit: Submit
    answering: Answering

    def asked(self, salt: str) -> dict[str, Any]:
        """What each request says. ``salt`` keeps what one repetition stores from the next."""
        if self.method == "full":
            return {"mode": "off", "store": False, "cache_salt": salt}
        mode = "contiguous" if self.method == "contiguous" else "blend"
        ratio = 0.0 if self.method == "reuse" else self.ratio
        # What the first pass blended would be settled in the second, which is to blend as well.
        return {"mode": mode, "recompute_ratio": ratio, "settled": False, "cache_salt": salt}


class Measured(msgspec.Struct):
    """One pass over all queries."""

    f1: float
    rouge_l: float
    hit_rate: float
    """The share of the prompts' tokens that were reused."""
    computed: float
    """The share of the prompts' tokens that were computed."""
    first_token_s: list[float]
    between_tokens_s: list[float]
    ended_s: list[float]
    phase_s: dict[str, float]
    """Of all queries together."""


def run(
    engine: Engine, prompts: Sequence[Prompt], procedure: Procedure, repeats: int, steps: Steps
) -> list[list[Measured]]:
    """For each repetition what both passes measured."""
    found = []
    for repeat in range(repeats):
        asked = procedure.asked(f"repetition {repeat}")
        for prompt in steps(prompts, f"phase 1, repetition {repeat + 1}"):
            for document in prompt.known:
                engine.one(document, mode="exact", cache_salt=asked["cache_salt"])
        passes = []
        for number in (1, 2):
            engine.forget()
            passes.append(
                _measured(engine, prompts, procedure, asked, steps, f"pass {number}, repetition {repeat + 1}")
            )
        found.append(passes)
    return found


def _measured(
    engine: Engine, prompts: Sequence[Prompt], procedure: Procedure, asked: dict[str, Any], steps: Steps, what: str
) -> Measured:
    before = engine.call("counts")
    tokens = [prompt.tokens for prompt in prompts]
    if procedure.submit == "all":
        (answers,) = (procedure.answering.all(engine, together, asked) for together in steps([tokens], what))
    else:
        answers = [procedure.answering.one(engine, one, asked) for one in steps(tokens, what)]
    spent = Counter(engine.call("counts"))
    spent.subtract(before)
    return measured_of(prompts, answers, {name: spent[f"{name}_microseconds"] / 1e6 for name in PHASES})


def measured_of(prompts: Sequence[Prompt], answers: Sequence[Answer], phases: dict[str, float]) -> Measured:
    tokens = sum(len(prompt.tokens) for prompt in prompts)
    reports = [answer.report for answer in answers]
    reused = sum(one["engine_tokens"] + one["exact_tokens"] + one["moved_tokens"] for one in reports)
    scores = [prompt.question.score(answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
    f1, rouge_l = (statistics.mean(score or 0.0 for score in column) for column in zip(*scores, strict=True))
    return Measured(
        f1,
        rouge_l,
        reused / tokens,
        (tokens - reused + sum(one["recomputed_tokens"] for one in reports)) / tokens,
        [answer.first_token_s for answer in answers],
        [(one.ended_s - one.first_token_s) / max(1, len(one.tokens) - 1) for one in answers],
        [answer.ended_s for answer in answers],
        phases,
    )


def rows(found: Sequence[Sequence[Measured]], queries: int) -> list[Row]:
    """Of each pass; the median of the repetitions, which are the spread."""
    made = []
    for number, passes in enumerate(zip(*found, strict=True), 1):
        made += [
            row(f"pass_{number}_{id}", f"pass {number}: {what}", unit, [value(one) for one in passes], None, better)
            for id, what, unit, value, better in FIGURES
        ]
        made += [
            row(
                f"pass_{number}_{phase}",
                f"pass {number}: time of {phase} for a query",
                "s",
                [one.phase_s[phase] / queries for one in passes],
                None,
                "lower",
            )
            for phase in PHASES
        ]
    return made


FIGURES: list[tuple[str, str, str, Callable[[Measured], float], Literal["higher", "lower"]]] = [
    ("f1", "F1", "share", lambda one: one.f1, "higher"),
    ("rouge_l", "ROUGE-L", "share", lambda one: one.rouge_l, "higher"),
    ("hit_rate", "share of the prompt that was reused", "share", lambda one: one.hit_rate, "higher"),
    ("computed", "share of the prompt that was computed", "share", lambda one: one.computed, "lower"),
    ("ttft_mean", "time to first token, mean", "s", lambda one: statistics.mean(one.first_token_s), "lower"),
    ("ttft_p90", "time to first token, 90th percentile", "s", lambda one: _p90(one.first_token_s), "lower"),
    ("tbt", "time between tokens, mean", "s", lambda one: statistics.mean(one.between_tokens_s), "lower"),
    ("e2e", "end to end, mean", "s", lambda one: statistics.mean(one.ended_s), "lower"),
]


def _p90(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.9))
