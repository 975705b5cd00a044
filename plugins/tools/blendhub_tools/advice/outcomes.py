"""Scores of answers, and the share of what reuse loses that recomputation wins back: pure arithmetic."""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

MIN_LOSS = 0.05
"""A smaller loss has no share won back: a few questions would decide it."""
RESAMPLES = 400

Accuracy: TypeAlias = npt.NDArray[np.float64]


class Outcome(msgspec.Struct):
    """What one way of serving answered to all cases."""

    selector: str
    """"full": computed without reuse; "reuse": nothing is recomputed."""
    state: str
    """"settled": the prompt's first question was asked before. Empty otherwise."""
    ratio: float
    scores: list[list[float]] = []
    """For each case the sum of its questions' scores in each column."""
    asked: list[list[int]] = []
    """For each case how many questions count in each column."""
    recomputed: list[float] = []
    """For each case the share of the moved tokens that was computed again, what a probe costs included."""
    first_token_s: list[float] = []
    workload: str = ""
    """The texts and tasks that the real model is asked about."""
    times_computed: float = 0.0
    """How often each document had been computed before, as the mean of its tokens."""

    def note(self, table: Sequence[Sequence[float | None]], recomputed: float) -> None:
        """Add a case: the scores of each of its questions, None in columns where the question does not count."""
        self.scores.append([sum(score or 0.0 for score in column) for column in zip(*table, strict=True)])
        self.asked.append([sum(score is not None for score in column) for column in zip(*table, strict=True)])
        self.recomputed.append(recomputed)

    @property
    def key(self) -> tuple[str, str, float]:
        return self.selector, self.state, self.ratio


def accuracy(outcome: Outcome) -> Accuracy:
    """The mean score in each column."""
    mean: Accuracy = np.sum(outcome.scores, 0) / np.maximum(np.sum(outcome.asked, 0), 1)
    return mean


def interval(outcome: Outcome, column: int) -> tuple[float, float]:
    """95% of the mean scores lie in it when prompts are drawn anew from those that were asked."""
    return _middle(_means(outcome, [column], _draws(outcome)))


def won_back(ours: float, full: float, reuse: float, least: float = MIN_LOSS) -> float | None:
    """The share of what reuse loses against full prefill; None where it loses next to nothing."""
    return (ours - reuse) / (full - reuse) if full - reuse >= least else None


class Comparison(msgspec.Struct):
    """One outcome beside full prefill and reuse without recomputation, on the same cases."""

    ours: Outcome
    full: Outcome
    reuse: Outcome
    least: float = MIN_LOSS

    def share(self, columns: Sequence[int]) -> float | None:
        """What is won back of the mean score in these columns."""
        outcomes = self.ours, self.full, self.reuse
        ours, full, reuse = (float(accuracy(outcome)[[*columns]].mean()) for outcome in outcomes)
        return won_back(ours, full, reuse, self.least)

    def interval(self, columns: Sequence[int]) -> tuple[float, float] | None:
        """95% of the shares lie in it when prompts are drawn anew from those that were asked."""
        draws = _draws(self.ours)
        means = (_means(outcome, columns, draws) for outcome in (self.ours, self.full, self.reuse))
        shares = (won_back(ours, full, reuse, self.least) for ours, full, reuse in zip(*means, strict=True))
        certain = [share for share in shares if share is not None]
        return _middle(certain) if certain else None


def _draws(outcome: Outcome) -> npt.NDArray[np.int64]:
    number = len(outcome.scores)
    return np.random.default_rng(0).integers(0, number, (RESAMPLES, number))


def _middle(draws: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def _means(outcome: Outcome, columns: Sequence[int], draws: npt.NDArray[np.int64]) -> list[float]:
    """The mean score in these columns, for each draw of cases."""
    scores, asked = (np.array(table)[draws].sum(1)[:, [*columns]] for table in (outcome.scores, outcome.asked))
    means: list[float] = (scores / np.maximum(asked, 1)).mean(1).tolist()
    return means
