"""How much moved text is recomputed, so that agreement is held: pure, one outcome of an audit after the other.

Ratios are steps of a ladder; above its top is exact reuse, without any moved text. Requests are served at one step.
Audits look at that step, and at the one below: an audited request is answered from exact KV whatever it blends, so the
lower step is tried without a worse answer. The ratio rises one step when the step in use disagrees too often, and falls
one step only when the step below has itself shown that it agrees often enough.

Both are decided by cumulative sums of log-likelihood ratios (Page's test) between the allowed share of disagreements
and several others. Where the share is exactly the allowed one, a sum reaches its limit by mistake once in thousands of
audits, and far more rarely where the share is away from it: so the ratio does not swing between two steps. A change of
the traffic is noticed however long all was well before, because sums do not fall below zero.
"""

import math
from collections.abc import Sequence

FACTOR = 2.0
"""The factor from one step of the ladder to the next."""

LEAST = 0.01
"""The lowest step above zero, where zero is allowed."""

RISE_MISTAKES, FALL_MISTAKES = 1e-3, 1e-4
"""How often a sum reaches its limit by mistake. A rise by mistake costs computation, a fall would cost answers."""

SUSPICION = 0.25
"""The part of the evidence for a rise from which on all audits look at the step in use."""

UNTRIED = 100
"""The number of a step's first audits that all look at it, so that after too small a rise the next one follows soon."""

WORSE, BETTER = (2.0, 4.0, 8.0, 16.0, 32.0), (1 / 2, 1 / 4, 1 / 8)
"""The odds of a disagreement that the test distinguishes from the allowed odds, as multiples of these."""


def ladder(start: float, low: float, high: float) -> tuple[list[float], int]:
    """The steps from ``low`` to ``high``, and the number of the one that is ``start``."""
    below, above = [start], [start]
    while below[-1] > low:
        lower = below[-1] / FACTOR
        # A last step that were much smaller than the others joins the one before it.
        below.append(lower if lower > max(low * math.sqrt(FACTOR), LEAST) else low)
    while above[-1] < high:
        higher = above[-1] * FACTOR if above[-1] else LEAST
        above.append(higher if higher < high / math.sqrt(FACTOR) else high)
    return [*reversed(below), *above[1:]], len(below) - 1


class Evidence:
    """Whether outcomes speak for other odds of a disagreement than the allowed ones. Any of several odds will do."""

    def __init__(self, allowed: float, multiples: Sequence[float], mistakes: float) -> None:
        odds = allowed / (1 - allowed)
        others = [odds * multiple / (1 + odds * multiple) for multiple in multiples]
        self._steps = [(math.log(other / allowed), math.log((1 - other) / (1 - allowed))) for other in others]
        self._limit = math.log(len(others) / mistakes)
        self._sums = [0.0] * len(others)

    def note(self, agrees: bool) -> None:
        self._sums = [max(0.0, sum_ + step[agrees]) for sum_, step in zip(self._sums, self._steps, strict=True)]

    @property
    def weight(self) -> float:
        """The weight of the evidence: 0 is none; 1 or more is enough."""
        return max(self._sums) / self._limit


class HeldRatio:
    """The present step, and what its audits and those of the step below have shown."""

    def __init__(self, target: float, ratios: Sequence[float], step: int) -> None:
        """``target``: the share of audits that should agree. ``step``: the number of the ratio to begin with."""
        self._allowed = 1 - target
        self._ratios = tuple(ratios)
        self._step = step
        self._forget()

    @property
    def ratio(self) -> float | None:
        """The ratio that requests are served with; None: exact reuse alone."""
        return self._ratios[self._step] if self._step < len(self._ratios) else None

    def audited(self, chance: float) -> float:
        """The ratio that an audit looks at; ``chance`` is that of its request, from 0 to 1."""
        below = self._ratios[max(self._step - 1, 0)]
        if self.ratio is None:
            return below
        is_trusted = self._seen >= UNTRIED and self._worse.weight < SUSPICION
        return below if is_trusted and chance < 0.5 else self.ratio

    def note(self, ratio: float, agrees: bool) -> bool:
        """Take note of an audit at this ratio; returns whether the step has changed."""
        if ratio == self.ratio:
            self._seen += 1
            self._worse.note(agrees)
            if self._worse.weight >= 1:
                return self._go(self._step + 1)
        elif self._step and ratio == self._ratios[self._step - 1]:
            self._better.note(agrees)
            if self._better.weight >= 1:
                return self._go(self._step - 1)
        return False

    def _go(self, step: int) -> bool:
        self._step = step
        self._forget()
        return True

    def _forget(self) -> None:
        """Drop all evidence: what a step in use showed says little of it as the step below, after traffic changed."""
        self._seen = 0
        self._worse = Evidence(self._allowed, WORSE, RISE_MISTAKES)
        self._better = Evidence(self._allowed, BETTER, FALL_MISTAKES)
