"""Turns measured agreement into advice; pure functions."""

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from blendhub.outcome.agreement import Interval, wilson


class PromptAudit(msgspec.Struct, frozen=True):
    """The audit of one prompt."""

    agrees: bool
    kl: float
    moved_tokens: int


class Measured(msgspec.Struct, frozen=True):
    """The audits of all prompts with one selector and one ratio."""

    selector: str
    ratio: float
    audits: tuple[PromptAudit, ...]
    """The audits of the prompts in which text was moved."""

    @property
    def agreed(self) -> int:
        return sum(one.agrees for one in self.audits)

    @property
    def agreement(self) -> float:
        return self.agreed / len(self.audits) if self.audits else 0.0

    @property
    def interval(self) -> Interval:
        return wilson(self.agreed, len(self.audits))

    @property
    def divergence(self) -> float:
        """The median divergence of the audits."""
        return statistics.median([one.kl for one in self.audits]) if self.audits else 0.0


class Advice(msgspec.Struct, frozen=True):
    chosen: Measured | None
    """The measurement to choose; None: no measurement holds the agreement with 95% confidence."""
    promising: Measured | None = None
    """Without a choice: what agreed most, where that was above the target, but in too few audits."""


def advise(measured: Sequence[Measured], target: float) -> Advice:
    """The measurement that recomputes least among those whose whole interval of agreement lies above the target."""
    audited = [one for one in measured if one.audits]
    if enough := [one for one in audited if one.interval.low >= target]:
        return Advice(min(enough, key=lambda one: (one.ratio, -one.agreement)))
    above = [one for one in audited if one.agreement > target]
    return Advice(None, max(above, key=lambda one: (one.agreement, -one.ratio), default=None))


def settings_for(advice: Advice, target: float, given: dict[str, Any]) -> dict[str, Any]:
    """The settings to paste: the given ones, changed as advised."""
    if advice.chosen is None:
        return {**given, "mode": "exact"}
    options = given.get("selector", {}).get("options", {})
    is_given = given.get("selector", {}).get("name") == advice.chosen.selector
    selector = {"name": advice.chosen.selector} | ({"options": options} if options and is_given else {})
    return {**given, "selector": selector, "recompute_ratio": advice.chosen.ratio, "expected_agreement": target}
