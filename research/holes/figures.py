"""The measurements of each query, and the rows that sum them up; pure."""

import statistics
from collections.abc import Callable
from operator import methodcaller as of
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from benchmarks.report import Better, Row, row

PHASES = ("lookup", "load", "probe", "recompute", "save")
Path: TypeAlias = Literal["no_hole", "hole_in_front", "hole_behind"]
"""A request with holes goes by its first one, which begins the prompt, or stands behind reused text."""
PATHS: dict[Path, str] = {
    "no_hole": "without a hole",
    "hole_in_front": "that begin with a hole",
    "hole_behind": "whose first hole stands behind reused text",
}


class Answered(msgspec.Struct, kw_only=True):
    """One query of a pass."""

    f1: float
    rouge_l: float
    path: Path
    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    """With the reused ones that were recomputed."""
    hole_tokens: int
    """The number of tokens computed before reused ones."""
    first_token_s: float
    ended_s: float
    between_tokens_s: float
    answer: str
    right: list[str]
    """The answers that would be right."""


class Pass(msgspec.Struct):
    """One pass over all queries."""

    queries: list[Answered]
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

    def greatest(self, name: str) -> float:
        return max(self.all(name))

    def share(self, name: str) -> float:
        """Such tokens, as a share of the tokens of all prompts."""
        return self.mean(name) / self.mean("prompt_tokens")

    def greatest_share(self, name: str) -> float:
        """The greatest share of a single prompt."""
        return max(tokens / prompt for tokens, prompt in zip(self.all(name), self.all("prompt_tokens"), strict=True))

    def took(self, *paths: Path) -> float:
        """The share of the requests with one of these paths."""
        return statistics.mean(query.path in paths for query in self.queries)

    def phase(self, name: str) -> float:
        """The seconds of a phase for a query."""
        return self.phase_s[name] / len(self.queries)


class Measured(msgspec.Struct):
    """All passes of one way to ask."""

    computed_before_s: float
    """The time of what was computed before the queries."""
    passes: list[Pass]


Results: TypeAlias = dict[str, Measured]
"""What was measured, by the label of the way."""


class Figure(NamedTuple):
    what: str
    unit: str
    of: Callable[[Pass], float]
    better: Better = "lower"


FIGURES = {
    "f1": Figure("F1", "share", of("mean", "f1"), "higher"),
    "rouge_l": Figure("ROUGE-L", "share", of("mean", "rouge_l"), "higher"),
    "hit_rate": Figure("share of the prompts that was reused", "share", of("share", "reused_tokens"), "higher"),
    "hit_tokens": Figure("reused tokens of a prompt, mean", "tokens", of("mean", "reused_tokens"), "higher"),
    "most_reused": Figure(
        "greatest reused share of a prompt", "share", of("greatest_share", "reused_tokens"), "higher"
    ),
    "most_reused_tokens": Figure("most reused tokens of a prompt", "tokens", of("greatest", "reused_tokens"), "higher"),
    "computed": Figure("share of the prompts that was computed", "share", of("share", "computed_tokens")),
    "computed_tokens": Figure("computed tokens of a prompt, mean", "tokens", of("mean", "computed_tokens")),
    "in_holes": Figure("share of the prompts that stood in holes", "share", of("share", "hole_tokens")),
    "hole_tokens": Figure("tokens in the holes of a prompt, mean", "tokens", of("mean", "hole_tokens")),
    "largest_hole": Figure("greatest share of a prompt in holes", "share", of("greatest_share", "hole_tokens")),
    "largest_hole_tokens": Figure("most tokens in the holes of a prompt", "tokens", of("greatest", "hole_tokens")),
    "with_holes": Figure("share of the requests with holes", "share", of("took", "hole_in_front", "hole_behind")),
    **{path: Figure(f"share of the requests {which}", "share", of("took", path)) for path, which in PATHS.items()},
    "ttft_mean": Figure("time to first token, mean", "s", of("mean", "first_token_s")),
    "ttft_p90": Figure("time to first token, 90th percentile", "s", of("p90", "first_token_s")),
    "tbt": Figure("time between tokens, mean", "s", of("mean", "between_tokens_s")),
    "tbt_p90": Figure("time between tokens, 90th percentile", "s", of("p90", "between_tokens_s")),
    "e2e": Figure("end to end, mean", "s", of("mean", "ended_s")),
    "e2e_p90": Figure("end to end, 90th percentile", "s", of("p90", "ended_s")),
    "a_query": Figure("time of the pass for each query", "s", lambda run: run.seconds / len(run.queries)),
    **{phase: Figure(f"time of {phase} for a query", "s", of("phase", phase)) for phase in PHASES},
}


def rows(results: Results) -> list[Row]:
    all_rows = []
    for label, measured in results.items():
        what = f"{label}: time of what is computed before the queries"
        all_rows.append(row(f"{label}_before", what, "s", [measured.computed_before_s], better="lower"))
        for number, run in enumerate(measured.passes, 1):
            for name, figure in FIGURES.items():
                what = f"{label}, pass {number}: {figure.what}"
                id = f"{label}_pass_{number}_{name}"
                all_rows.append(row(id, what, figure.unit, [figure.of(run)], better=figure.better))
            if label != "full" and "full" in results:
                ours, full = (
                    statistics.median(each.all("first_token_s")) for each in (run, results["full"].passes[number - 1])
                )
                what = f"{label}, pass {number}: median time to first token, relative to full prefill"
                all_rows.append(row(f"{label}_pass_{number}_ttft_by_full", what, "x", [ours / full], better="lower"))
    return all_rows
