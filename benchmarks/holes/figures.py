"""The measurements of each query, and the rows that sum them up; pure."""

import statistics
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from benchmarks.report import Row, row

PHASES = ("lookup", "load", "probe", "recompute", "save")


class Query(msgspec.Struct):
    """One query of a pass."""

    f1: float
    rouge_l: float
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    """The number of reused tokens that were recomputed."""
    hole_tokens: int
    """The number of tokens computed between reused ones."""
    first_token_s: float
    ended_s: float
    between_tokens_s: float
    answer: str
    right: list[str]
    """The answers that would be right."""


class Measured(msgspec.Struct):
    """One pass over all queries."""

    queries: list[Query]
    with_holes: int
    """The number of requests with a hole, by the engine's counter."""
    phase_s: dict[str, float]
    """The seconds of each phase, of all queries together."""

    def all(self, name: str) -> list[float]:
        """A field of every query."""
        return [getattr(query, name) for query in self.queries]

    def mean(self, name: str) -> float:
        return statistics.mean(self.all(name))

    def median(self, name: str) -> float:
        return statistics.median(self.all(name))

    def p90(self, name: str) -> float:
        return float(np.quantile(self.all(name), 0.9))

    @property
    def hit_rate(self) -> float:
        return self.mean("reused_tokens") / self.mean("prompt_tokens")

    @property
    def in_holes(self) -> float:
        return self.mean("hole_tokens") / self.mean("prompt_tokens")

    @property
    def computed(self) -> float:
        return 1 - self.hit_rate + self.mean("recomputed_tokens") / self.mean("prompt_tokens")


Found: TypeAlias = dict[str, list[Measured]]
"""The passes, by the label of the way."""


class Figure(NamedTuple):
    what: str
    unit: str
    of: Callable[[Measured], float]
    better: Literal["higher", "lower"] = "lower"


FIGURES = {
    "f1": Figure("F1", "share", lambda one: one.mean("f1"), "higher"),
    "rouge_l": Figure("ROUGE-L", "share", lambda one: one.mean("rouge_l"), "higher"),
    "hit_rate": Figure("share of the prompts that was reused", "share", lambda one: one.hit_rate, "higher"),
    "computed": Figure("share of the prompts that was computed", "share", lambda one: one.computed),
    "in_holes": Figure("share of the prompts that stood in holes", "share", lambda one: one.in_holes),
    "with_holes": Figure("share of the requests with holes", "share", lambda one: one.with_holes / len(one.queries)),
    "ttft_mean": Figure("time to first token, mean", "s", lambda one: one.mean("first_token_s")),
    "ttft_p90": Figure("time to first token, 90th percentile", "s", lambda one: one.p90("first_token_s")),
    "tbt": Figure("time between tokens, mean", "s", lambda one: one.mean("between_tokens_s")),
    "tbt_p90": Figure("time between tokens, 90th percentile", "s", lambda one: one.p90("between_tokens_s")),
    "e2e": Figure("end to end, mean", "s", lambda one: one.mean("ended_s")),
    "e2e_p90": Figure("end to end, 90th percentile", "s", lambda one: one.p90("ended_s")),
}


def rows(found: Found) -> list[Row]:
    made = []
    for label, passes in found.items():
        for number, one in enumerate(passes, 1):
            id, said = f"{label}_pass_{number}", f"{label}, pass {number}"
            for name, (what, unit, of, better) in FIGURES.items():
                made.append(row(f"{id}_{name}", f"{said}: {what}", unit, [of(one)], None, better))
            for phase in PHASES:
                seconds = one.phase_s[phase] / len(one.queries)
                made.append(row(f"{id}_{phase}", f"{said}: time of {phase} for a query", "s", [seconds], None, "lower"))
            if label != "full" and "full" in found:
                ratio = one.median("first_token_s") / found["full"][number - 1].median("first_token_s")
                what = f"{said}: median time to first token, relative to full prefill"
                made.append(row(f"{id}_ttft_by_full", what, "x", [ratio], None, "lower"))
    return made
