"""Turns measured agreement into advice; pure functions."""

from collections.abc import Sequence
from typing import Any

import msgspec

from blendhub.outcome.agreement import Interval, wilson
from blendhub_tools.advice.judge import ANSWER
from blendhub_tools.advice.outcomes import Outcome


def agreed(one: Outcome, column: int = ANSWER) -> tuple[int, int]:
    """How many answers are full prefill's own, and of how many."""
    return round(sum(case[column] for case in one.scores)), sum(case[column] for case in one.asked)


def agreement(one: Outcome) -> float:
    same, of = agreed(one)
    return same / of if of else 0.0


def interval(one: Outcome) -> Interval:
    return wilson(*agreed(one))


class Advice(msgspec.Struct, frozen=True):
    chosen: Outcome | None
    """The measurement to choose; None: no measurement holds the agreement with 95% confidence."""
    promising: Outcome | None = None
    """Without a choice: what agreed most, where that was above the target, but in too few answers."""


def advise(measured: Sequence[Outcome], target: float) -> Advice:
    """The measurement that recomputes least among those whose whole interval of agreement lies above the target."""
    moved = [one for one in measured if agreed(one)[1]]
    if enough := [one for one in moved if interval(one).low >= target]:
        return Advice(min(enough, key=lambda one: (one.ratio, -agreement(one))))
    above = [one for one in moved if agreement(one) > target]
    return Advice(None, max(above, key=lambda one: (agreement(one), -one.ratio), default=None))


def settings_for(advice: Advice, target: float, tokens: int, given: dict[str, Any]) -> dict[str, Any]:
    """The settings to paste: the given ones, changed as advised. Audits compare as many tokens as were measured."""
    if advice.chosen is None:
        return {**given, "mode": "exact"}
    return {
        **given,
        "selector": selector_of(advice.chosen.selector, given),
        "recompute_ratio": advice.chosen.ratio,
        "expected_agreement": target,
        "audit_tokens": tokens,
    }


def selector_of(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The selector of this name as the given settings have it."""
    chosen: dict[str, Any] = given.get("selector", {})
    return chosen if chosen.get("name") == name else {"name": name}
