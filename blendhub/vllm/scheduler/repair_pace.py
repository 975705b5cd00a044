"""How many tokens a step may compute anew, by time: the costs measured at the start, and the steps that were taken."""

import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from blendhub.core.spans import Span
from blendhub.vllm.costs import Cost, Costs

MIN_TOKENS = 8
"""Fewer tokens take about as long."""
SAVED_UP_FORWARDS = 2
"""Steps save up for a forward that takes so many times as long as the least one, and computes far more tokens."""
GUESSED_COST = Cost(1e-3, measured=((0.016, 0.016),))
"""Where costs were not measured at the start, steps show how far this one is off; 8 tokens take as long as 16."""
MEASURED_STEPS = 8
"""The steps without a repair that tell how long one takes."""


class Limits(NamedTuple):
    """How much of an engine repairs may take."""

    share: float
    """By how much steps that write answers may take longer, on average."""
    idle_s: float
    """The longest repair in a step without an answer: the next request may come at any moment. None begins before the
    engine has been idle for as long: a client that asks again at once waits for none."""
    idle_forwards: int = 0
    """Or so many of the least forwards, where these take longer."""
    tokens: int = sys.maxsize
    """The most tokens that are repaired at a time beside answers."""
    spares_others: bool = False
    """Whether repairs that need an idle engine wait for answers that are not repaired themselves."""


ON_CPUS = Limits(0.5, 0.05, SAVED_UP_FORWARDS)
ON_ACCELERATORS = Limits(0.25, 0.015, tokens=512, spares_others=True)
"""Answers are written so fast there that the least forward takes as long as many tokens."""


class Step(NamedTuple):
    n_answers: int
    """The number of requests whose answers it computes."""
    is_measured: bool = False
    """Whether it computes nothing else."""
    estimated_s: float = 0.0
    """What its repair should take by the costs of the start."""


class RepairPace:
    """Limits by how much repairs make steps longer that compute answers: on average by a share.

    Each step becomes longer by that share at most. Where even the least forward takes longer than that, some steps
    become longer by ``SAVED_UP_FORWARDS`` of the least forwards, and the others do not.
    """

    def __init__(
        self, costs: Costs | None, limits: Limits, lag: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``lag``: how many steps vLLM plans ahead of the one that it computes."""
        self.limits = limits
        self._cost = costs.recompute if costs else GUESSED_COST
        self._clock = clock
        self._steps = deque([Step(0)] * (lag + 1))
        """The planned steps that have not ended; the last is being planned."""
        self._begun_at = clock()
        self._idle_since: float | None = None
        """Since when steps have computed nothing."""
        self._plain: deque[float] = deque(maxlen=MEASURED_STEPS)
        """How long the last steps took that computed so many answers, and repaired nothing."""
        self._n_answers = 0
        self._factor = 1.0
        """How much longer repairs take than by the costs of the start."""
        self._credit = 0.0
        """The seconds by which answers may still be slowed down."""
        self._most = 0.0
        """The most seconds that one step's repair may take; credit is saved up to this."""
        self._n_last = MIN_TOKENS
        """How many tokens were repaired beside answers at a time; the next ones are at most twice as many, because what
        few tokens take says little about many.
        """

    def begin_step(self, n_answers: int, *, only_answers: bool = True) -> None:
        """A step is planned that computes tokens of so many answers; ``only_answers``: and of no prompt."""
        now = self._clock()
        self._end_step(self._steps.popleft(), now - self._begun_at)
        self._begun_at = now
        if n_answers or not only_answers:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        self._steps.append(Step(n_answers, only_answers and n_answers > 0))
        if n_answers and self._plain:
            step = median(self._plain)
            share = self.limits.share * step
            least = self._seconds(Span(0, MIN_TOKENS))
            self._most = share if least <= share else SAVED_UP_FORWARDS * least
            self._credit = min(self._credit, self._most) + share

    def take(self, left: Span, most: int, *, at_once: bool = False) -> int:
        """How many tokens of the span the step repairs; it is planned to.

        ``at_once``: also before the engine has been idle for long.
        """
        answers, longest = self._steps[-1].n_answers, min(most, len(left))
        least = min(MIN_TOKENS, longest)
        if not answers:
            limit = max(self.limits.idle_s, self.limits.idle_forwards * self._seconds(Span(0, MIN_TOKENS)))
            if not at_once and (self._idle_since is None or self._begun_at - self._idle_since < limit):
                return 0
        elif self._plain:
            limit, longest = min(self._credit, self._most), min(longest, 2 * self._n_last, self.limits.tokens)
        else:
            return 0
        n = bisect_right(range(1, longest + 1), limit, key=lambda n: self._seconds(Span(left.start, left.start + n)))
        if answers and limit < self._most and n < len(left):
            return 0
        n = max(n, least)
        seconds = self._seconds(Span(left.start, left.start + n))
        if answers:
            self._credit -= seconds
            self._n_last = max(n, self._n_last if n == len(left) else MIN_TOKENS)
        self._steps[-1] = self._steps[-1]._replace(estimated_s=seconds / self._factor)
        return n

    def _seconds(self, span: Span) -> float:
        return self._factor * self._cost.seconds(self._cost.sum([span]))

    def _end_step(self, step: Step, taken_s: float) -> None:
        if not step.is_measured:
            return
        if step.n_answers != self._n_answers:
            self._plain.clear()
            self._n_answers = step.n_answers
        if not step.estimated_s:
            self._plain.append(taken_s)
        elif self._plain:
            factor = (taken_s - median(self._plain)) / step.estimated_s
            self._factor += 0.25 * (min(max(factor, self._factor / 4), self._factor * 4) - self._factor)
