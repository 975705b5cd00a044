"""Which engine gets a prompt: the one that reuses most of it, unless it has much more to compute than the others."""

from collections.abc import Sequence

BOUND = 1.05
"""An engine gets no prompt while its load is above this times the mean load, and the slack beyond."""
WEIGHT = 0.5
"""The share of the prompt that an engine must reuse more if its load is twice the mean."""


class Loads:
    """The tokens that each engine was given to compute lately: they count less and less."""

    def __init__(self, n_engines: int, half_life: float) -> None:
        self._loads = [0.0] * n_engines
        self._half_life = half_life
        self._at = 0.0

    def add(self, engine: int, tokens: float, now: float) -> None:
        self._loads = self.now(now)
        self._at = now
        self._loads[engine] += tokens

    def now(self, now: float) -> list[float]:
        left = 0.5 ** ((now - self._at) / self._half_life)
        return [load * left for load in self._loads]


def choose(reused: Sequence[float], loads: Sequence[float], n_tokens: int, slack: float) -> int:
    """The number of the engine for a prompt of so many tokens, of which each engine reuses some.

    ``slack``: tokens of load that need no balance, so that a lone user stays where the conversation is.
    """
    mean = sum(loads) / len(loads)
    price = WEIGHT * n_tokens / (mean + slack)
    return max(
        (number for number, load in enumerate(loads) if load <= BOUND * mean + slack),
        key=lambda number: (reused[number] - price * (loads[number] - mean), -loads[number]),
    )
