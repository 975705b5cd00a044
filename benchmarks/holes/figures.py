"""The measurements of each query, and the rows that sum them up; pure."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import msgspec
import numpy as np

from benchmarks.report import Better, Row, row

PHASES = ("lookup", "load", "probe", "recompute", "save")


class Answered(msgspec.Struct):
    """One query of a pass."""

    f1: float
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


class Pass(msgspec.Struct):
    """One pass over all queries."""

    queries: list[Answered]
    with_holes: int
    """The number of requests with a hole, by the engine's counter."""
    phase_s: dict[str, float]
    """The seconds of each phase, of all queries together."""
    seconds: float

    def all(self, name: str) -> list[float]:
        """A field of every query."""
        return [getattr(query, name) for query in self.queries]

    def mean(self, name: str) -> float:
        return statistics.mean(self.all(name))

    def p90(self, name: str) -> float:
        return float(np.quantile(self.all(name), 0.9))

    def share(self, name: str) -> float:
        """Such tokens, as a share of the tokens of all prompts."""
        return self.mean(name) / self.mean("prompt_tokens")

    def greatest(self, name: str) -> float:
        """The greatest share of a single prompt."""
        return max(tokens / prompt for tokens, prompt in zip(self.all(name), self.all("prompt_tokens"), strict=True))

    def phase(self, name: str) -> float:
        return self.phase_s[name] / len(self.queries)

    def computed(self) -> float:
        return 1 - self.share("reused_tokens") + self.share("recomputed_tokens")


class Measured(msgspec.Struct):
    """All passes of one way to ask."""

    computed_before_s: float
    """The time of what was computed before the queries."""
    passes: list[Pass]


Results: TypeAlias = dict[str, Measured]
"""What was measured, by the label of the way."""


def _of(figure: Callable[[Pass, str], float], name: str) -> Callable[[Pass], float]:
    return partial(lambda name, run: figure(run, name), name)


FIGURES: dict[str, tuple[str, str, Better, Callable[[Pass], float]]] = {
    "f1": ("F1", "share", "higher", _of(Pass.mean, "f1")),
    "hit_rate": ("share of the prompts that was reused", "share", "higher", _of(Pass.share, "reused_tokens")),
    "computed": ("share of the prompts that was computed", "share", "lower", Pass.computed),
    "in_holes": ("share of the prompts that stood in holes", "share", "lower", _of(Pass.share, "hole_tokens")),
    "with_holes": ("share of the requests with holes", "share", "lower", lambda run: run.with_holes / len(run.queries)),
    "most_reused": ("greatest reused share of a prompt", "share", "higher", _of(Pass.greatest, "reused_tokens")),
    "largest_hole": ("greatest share of a prompt in holes", "share", "lower", _of(Pass.greatest, "hole_tokens")),
    "ttft_mean": ("time to first token, mean", "s", "lower", _of(Pass.mean, "first_token_s")),
    "ttft_p90": ("time to first token, 90th percentile", "s", "lower", _of(Pass.p90, "first_token_s")),
    "tbt": ("time between tokens, mean", "s", "lower", _of(Pass.mean, "between_tokens_s")),
    "tbt_p90": ("time between tokens, 90th percentile", "s", "lower", _of(Pass.p90, "between_tokens_s")),
    "e2e": ("end to end, mean", "s", "lower", _of(Pass.mean, "ended_s")),
    "e2e_p90": ("end to end, 90th percentile", "s", "lower", _of(Pass.p90, "ended_s")),
    "a_query": ("time of the pass for each query", "s", "lower", lambda run: run.seconds / len(run.queries)),
    **{phase: (f"time of {phase} for a query", "s", "lower", _of(Pass.phase, phase)) for phase in PHASES},
}


def rows(results: Results) -> Iterator[Row]:
    for label, measured in results.items():
        before = f"{label}: time of what is computed before the queries"
        yield row(f"{label}_before", before, "s", [measured.computed_before_s], better="lower")
        for number, run in enumerate(measured.passes, 1):
            id, of_pass = f"{label}_pass_{number}", f"{label}, pass {number}"
            for name, (what, unit, better, figure) in FIGURES.items():
                yield row(f"{id}_{name}", f"{of_pass}: {what}", unit, [figure(run)], better=better)
            if label != "full" and "full" in results:
                passes = run, results["full"].passes[number - 1]
                ours, full = (statistics.median(each.all("first_token_s")) for each in passes)
                what = f"{of_pass}: median time to first token, relative to full prefill"
                yield row(f"{id}_ttft_by_full", what, "x", [ours / full], better="lower")
