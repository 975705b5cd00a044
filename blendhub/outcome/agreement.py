"""The share of audits that agreed, and its confidence interval."""

import math
from typing import NamedTuple

USUAL = 1.96
"""The normal quantile of intervals that miss the true share once in 20."""


class Interval(NamedTuple):
    low: float
    high: float


def wilson(agreed: float, audits: float, quantile: float = USUAL) -> Interval:
    """Wilson's interval for a share. Sound for few audits, and for shares near 1, where agreement is."""
    if audits <= 0:
        return Interval(0.0, 1.0)
    share, square = agreed / audits, quantile * quantile
    middle = (share + square / (2 * audits)) / (1 + square / audits)
    reach = quantile * math.sqrt(share * (1 - share) / audits + square / (4 * audits * audits)) / (1 + square / audits)
    # With all or none agreed an end is 1 or 0, but for rounding.
    return Interval(0.0 if agreed == 0 else middle - reach, 1.0 if agreed == audits else middle + reach)


def audits_needed(agreed: float, target: float) -> int | None:
    """How many audits prove a share above the target if the true share is ``agreed``; None: no number proves it."""
    if agreed <= target:
        return None
    # An interval of Wilson's lies above a share if a test of that share says so.
    return math.ceil(USUAL * USUAL * target * (1 - target) / (agreed - target) ** 2)
