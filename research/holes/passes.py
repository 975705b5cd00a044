"""The procedure: documents are computed, vLLM's own cache is emptied, one pass fills the holes, the next only reuse."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from benchmarks.quality.serving import reported
from benchmarks.timing import progress
from harness.engines import Answer, Engine
from research.holes.figures import PHASES, Answered, Measured, Pass, Results
from research.holes.prompts import Prompt, Writer, before
from research.holes.scores import f1, rouge_l

ANSWER_TOKENS = 10
"""The most tokens of an answer, as in the published benchmark."""
REUSED = ("engine", "exact", "moved")
Method: TypeAlias = Literal["blend", "reuse", "full", "contiguous"]
AtOnce: TypeAlias = Literal["one", "all"]
"""How many requests a pass asks at once."""


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


def run(
    engine: Engine, prompts: Sequence[Prompt], writer: Writer, ways: Sequence[Way], passes: int, at_once: AtOnce
) -> Results:
    """All ways in turn, each with nothing stored at its begin."""
    results: Results = {}
    asked: dict[str, Any] = {"tokens": ANSWER_TOKENS, "stop_token_ids": writer.stop, "explain": True}
    for way in ways:
        request = way.request()
        # A full prefill reads nothing that was stored.
        units = [] if way.method == "full" else before(prompts)
        begun = time.perf_counter()
        for batch in progress(_batches(units, at_once), f"{way.label}: what is computed before"):
            engine.ask(*batch, mode="exact", cache_salt=request["cache_salt"])
        results[way.label] = Measured(time.perf_counter() - begun, [])
        for number in range(1, passes + 1):
            engine.forget()
            counted, begun, answers = engine.call("counts"), time.perf_counter(), list[Answer]()
            for batch in progress(_batches(prompts, at_once), f"{way.label}: pass {number}"):
                answers += engine.ask(*(prompt.tokens for prompt in batch), **asked, **request)
            seconds, spent = time.perf_counter() - begun, Counter(engine.call("counts"))
            spent.subtract(counted)
            results[way.label].passes.append(
                Pass(
                    [answered(*pair, writer) for pair in zip(prompts, answers, strict=True)],
                    {name: float(spent[f"{name}_seconds"]) for name in PHASES},
                    seconds,
                )
            )
    return results


def _batches(prompts: Sequence[Any], at_once: AtOnce) -> list[Sequence[Any]]:
    return [prompts] if at_once == "all" and prompts else [[prompt] for prompt in prompts]


def answered(prompt: Prompt, answer: Answer, writer: Writer) -> Answered:
    report, right = reported(answer), prompt.query.answers
    text, reused = writer.first_line(answer.tokens), sum(report[f"{kind}_tokens"] for kind in REUSED)
    holes = report.get("spans", {}).get("holes")
    return Answered(
        f1=f1(text, right),
        rouge_l=rouge_l(text, right),
        path="no_hole" if not holes else "hole_in_front" if holes[0][0] == 0 else "hole_behind",
        prompt_tokens=len(prompt.tokens),
        reused_tokens=reused,
        computed_tokens=len(prompt.tokens) - reused + report["recomputed_tokens"],
        hole_tokens=report["hole_tokens"],
        first_token_s=answer.first_token_s,
        ended_s=answer.ended_s,
        between_tokens_s=(answer.ended_s - answer.first_token_s) / max(1, len(answer.tokens) - 1),
        answer=text,
        right=right,
    )
