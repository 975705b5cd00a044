"""The procedure: documents are computed, vLLM's own cache is emptied, one pass fills the holes, the next only reuse."""

import re
import string
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from benchmarks.holes.figures import PHASES, Answered, Measured, Pass, Results
from benchmarks.holes.prompts import Prompt, Writer, before
from benchmarks.quality.measure import reported
from benchmarks.timing import progress
from harness.engines import Answer, Engine

ANSWER_TOKENS = 10
"""The most tokens of an answer, as in the published benchmark."""
Method: TypeAlias = Literal["blend", "reuse", "full", "contiguous"]
PASSES = 2


class Way(msgspec.Struct, frozen=True):
    """One way to ask."""

    method: Method
    ratio: float

    @property
    def label(self) -> str:
        return f"{self.method}_{100 * self.ratio:g}" if self.method in ("blend", "contiguous") else self.method

    def request(self) -> dict[str, Any]:
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


def run(engine: Engine, prompts: Sequence[Prompt], writer: Writer, ways: Sequence[Way]) -> Results:
    """All ways in turn, each with nothing stored at its begin."""
    results: Results = {}
    ending: dict[str, Any] = {"tokens": ANSWER_TOKENS, "stop_token_ids": writer.stop}
    for way in ways:
        request = way.request()
        # A full prefill reads nothing that was stored.
        units = [] if way.method == "full" else before(prompts)
        begun = time.perf_counter()
        for unit in progress(units, f"{way.label}: what is computed before"):
            engine.one(unit, mode="exact", cache_salt=request["cache_salt"])
        results[way.label] = Measured(time.perf_counter() - begun, [])
        for number in range(1, PASSES + 1):
            engine.forget()
            counted, begun = engine.call("counts"), time.perf_counter()
            said = progress(prompts, f"{way.label}: pass {number}")
            answers = [engine.one(prompt.tokens, **ending, **request) for prompt in said]
            seconds, spent = time.perf_counter() - begun, Counter(engine.call("counts"))
            spent.subtract(counted)
            results[way.label].passes.append(
                Pass(
                    [answered(*pair, writer) for pair in zip(prompts, answers, strict=True)],
                    spent["requests_with_holes"],
                    {name: float(spent[f"{name}_seconds"]) for name in PHASES},
                    seconds,
                )
            )
    return results


def answered(prompt: Prompt, answer: Answer, writer: Writer) -> Answered:
    report, right = reported(answer), prompt.query.answers
    text = writer.first_line(answer.tokens)
    return Answered(
        f1(text, right),
        len(prompt.tokens),
        report["engine_tokens"] + report["exact_tokens"] + report["moved_tokens"],
        report["recomputed_tokens"],
        report["hole_tokens"],
        answer.first_token_s,
        answer.ended_s,
        (answer.ended_s - answer.first_token_s) / max(1, len(answer.tokens) - 1),
        text,
        right,
    )


ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1(answer: str, right: Sequence[str]) -> float:
    """The best F1 of the words of an answer and of a right one, without articles and punctuation."""

    def words(text: str) -> Counter[str]:
        return Counter(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())

    said = words(answer)
    scores = (2 * (said & each).total() / max(1, said.total() + each.total()) for each in map(words, right))
    return max(scores, default=0.0)
