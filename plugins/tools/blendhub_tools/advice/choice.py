"""Turns measured agreement into advice; pure functions."""

from collections.abc import Sequence
from typing import Any

import msgspec

from blendhub.outcome.agreement import Interval, audits_needed, wilson
from blendhub_tools.advice.judge import ANSWER
from blendhub_tools.advice.outcomes import Outcome


def agreed(outcome: Outcome, column: int = ANSWER) -> tuple[int, int]:
    """How many answers are full prefill's own, and of how many."""
    return round(sum(case[column] for case in outcome.scores)), sum(case[column] for case in outcome.asked)


def agreement(outcome: Outcome) -> float:
    same, answers = agreed(outcome)
    return same / answers if answers else 0.0


def interval(outcome: Outcome) -> Interval:
    return wilson(*agreed(outcome))


class Advice(msgspec.Struct, frozen=True):
    chosen: Outcome | None
    """The measurement to choose; None: no measurement holds the agreement with 95% confidence."""
    promising: Outcome | None = None
    """Without a choice: what agreed most, where that was above the target, but in too few answers."""


def advise(measured: Sequence[Outcome], target: float) -> Advice:
    """The measurement that recomputes least among those whose whole interval of agreement lies above the target."""
    moved = [outcome for outcome in measured if agreed(outcome)[1]]
    if certain := [outcome for outcome in moved if interval(outcome).low >= target]:
        return Advice(min(certain, key=lambda outcome: (outcome.ratio, -agreement(outcome))))
    above = [outcome for outcome in moved if agreement(outcome) > target]
    return Advice(None, max(above, key=lambda outcome: (agreement(outcome), -outcome.ratio), default=None))


def in_words(advice: Advice, target: float, tokens: int) -> str:
    outcome = advice.chosen or advice.promising
    if outcome is None:
        return (
            f"Nothing that was measured holds {target:.0%} with {tokens} tokens; exact reuse does, or more of --ratios "
            "and --selectors."
        )
    same, answers = agreed(outcome)
    said = f"all {tokens} tokens of the answer" if tokens > 1 else "the first token of the answer"
    facts = f"{outcome.selector} with recompute_ratio {outcome.ratio:g} agreed on {said} in {same} of {answers} prompts"
    if advice.chosen:
        return f"{facts}, and with 95% confidence in more than {target:.0%} of such prompts."
    needed = audits_needed(agreement(outcome), target)
    return (
        f"{facts}. That is too few to be sure of {target:.0%}: if as many of the others agree, {needed:,} prompts show "
        "it (--data, --most). Until then, exact reuse is safe:"
    )


def settings_for(chosen: Outcome | None, target: float, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings to paste: the person's, changed as advised."""
    if chosen is None:
        return {**settings, "mode": "exact"}
    return {
        **settings,
        "selector": selector_of(chosen.selector, settings),
        "recompute_ratio": chosen.ratio,
        "expected_agreement": target,
    }


def selector_of(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The selector of this name as the settings have it."""
    selector: dict[str, Any] = settings.get("selector", {})
    return selector if selector.get("name") == name else {"name": name}
