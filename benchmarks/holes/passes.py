"""The procedure: documents are computed, vLLM's own cache is emptied, one pass fills the holes, the next only reuse."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from benchmarks.holes.figures import PHASES, Found, Measured, Query
from benchmarks.holes.order import Prompt, before
from benchmarks.quality.measure import reported
from benchmarks.quality.workload import Tokens
from benchmarks.timing import progress
from harness.engines import Answer, Engine

Method: TypeAlias = Literal["blend", "reuse", "full", "contiguous"]


class Way(msgspec.Struct, frozen=True):
    """One way to ask."""

    method: Method
    ratio: float

    @property
    def label(self) -> str:
        return f"{self.method}_{100 * self.ratio:g}" if self.method in ("blend", "contiguous") else self.method

    def asked(self) -> dict[str, Any]:
        """BlendHub's settings of each request. The salt keeps ways from finding what another one stored."""
        if self.method == "full":
            return {"mode": "off", "store": False, "cache_salt": self.label}
        mode = "contiguous" if self.method == "contiguous" else "blend"
        ratio = 0.0 if self.method == "reuse" else self.ratio
        # What the first pass blended would be settled in the second, which is to blend as well.
        return {"mode": mode, "recompute_ratio": ratio, "settled": False, "cache_salt": self.label}


def ways_of(methods: Sequence[Method], ratios: Sequence[float]) -> list[Way]:
    """Each method at each ratio, where that makes a difference, and each once."""
    ways = [Way(method, ratio) for method in methods for ratio in ratios]
    return list({way.label: way for way in ways}.values())


class Procedure(msgspec.Struct, frozen=True):
    ways: Sequence[Way]
    answer_tokens: int
    """The most tokens of an answer."""
    stop: tuple[int, ...]
    """Tokens that end an answer."""
    text: Callable[[Tokens], str]
    """The text of an answer."""
    passes: int = 2


def run(engine: Engine, prompts: Sequence[Prompt], procedure: Procedure) -> Found:
    """All ways in turn, each with nothing stored at its begin."""
    found: Found = {}
    for way in procedure.ways:
        asked = way.asked()
        # A full prefill reads nothing that was stored.
        units = [] if way.method == "full" else before(prompts)
        for unit in progress(units, f"{way.label}: what is computed before"):
            engine.one(unit, mode="exact", cache_salt=asked["cache_salt"])
        found[way.label] = []
        for number in range(1, procedure.passes + 1):
            engine.forget()
            found[way.label].append(_pass(engine, prompts, procedure, asked, f"{way.label}: pass {number}"))
    return found


def _pass(
    engine: Engine, prompts: Sequence[Prompt], procedure: Procedure, asked: dict[str, Any], what: str
) -> Measured:
    request = {"tokens": procedure.answer_tokens, "stop_token_ids": list(procedure.stop), **asked}
    counted = engine.call("counts")
    answers = [engine.one(prompt.tokens, **request) for prompt in progress(prompts, what)]
    spent = Counter(engine.call("counts"))
    spent.subtract(counted)
    return Measured(
        [query_of(prompt, answer, procedure.text) for prompt, answer in zip(prompts, answers, strict=True)],
        spent["requests_with_holes"],
        {name: float(spent[f"{name}_seconds"]) for name in PHASES},
    )


def query_of(prompt: Prompt, answer: Answer, text: Callable[[Tokens], str]) -> Query:
    report = reported(answer)
    return Query(
        *prompt.question.score(answer.tokens),
        len(prompt.tokens),
        report["engine_tokens"] + report["exact_tokens"] + report["moved_tokens"],
        report["recomputed_tokens"],
        report["hole_tokens"],
        answer.first_token_s,
        answer.ended_s,
        (answer.ended_s - answer.first_token_s) / max(1, len(answer.tokens) - 1),
        text(answer.tokens),
        list(prompt.question.right),
    )
