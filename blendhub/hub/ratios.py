"""The share of moved text that engines recompute where no setting says it, found from what repairs say of answers."""

import logging
import math

from blendhub.client.wire import FIRST_RATIO
from blendhub.outcome.agreement import Interval, wilson
from blendhub.outcome.report import Outcome

log = logging.getLogger(__name__)
LEAST, MOST = 0.05, 0.5
STEP = 0.7
"""A step down makes the share so many times as large, and a step up undoes one."""
TOKENS = 16
"""Answers are judged by so many of their first tokens."""
TARGET = 0.1 / TOKENS
"""The share of these tokens that may differ from what exact KV says: one in a tenth of the answers."""
SURE, SURER = 1.64, 3.09
"""The normal quantiles of bounds that are wrong once in 20, for a step down, and once in 1,000, for a step up, that the
first differing token must not decide."""


class Ratios:
    """The ratios of all namespaces, by the digests of these."""

    def __init__(self) -> None:
        self._found: dict[str, FoundRatio] = {}

    def of(self, namespace: str) -> float:
        found = self._found.get(namespace)
        return found.ratio if found else FIRST_RATIO

    def remember(self, namespace: str, ratio: float) -> None:
        """Begin at the ratio that an engine heard before this hub was started, unless the hub has found one."""
        self._found.setdefault(namespace, FoundRatio(min(max(LEAST, ratio), MOST)))

    def learn(self, namespace: str, outcome: Outcome) -> None:
        if outcome.has_found_ratio:
            self._found.setdefault(namespace, FoundRatio()).learn(outcome)


class FoundRatio:
    """The ratio of one namespace. It goes down where answers surely differ less often than they may, and up as soon as
    they surely differ more often."""

    def __init__(self, ratio: float = FIRST_RATIO) -> None:
        self.ratio = ratio
        self._forget()

    def learn(self, outcome: Outcome) -> None:
        """Learn from a request whose ratio was found, if it had this one."""
        if not outcome.has_found_ratio or outcome.ratio is None or not math.isclose(outcome.ratio, self.ratio):
            return
        repair, n_first = outcome.repair, min(TOKENS, outcome.answer_tokens)
        n_approximate = min(repair.exact_from - 1, n_first) if repair else n_first
        self._first += n_first
        self._approximate += n_approximate
        if repair:
            n_compared = min(repair.compared, n_approximate)
            self._compared += n_compared
            self._differing += sum(number < n_compared for number in repair.differing)
        elif outcome.audit and outcome.is_sample:  # where nothing is repaired
            self._compared += 1
            self._differing += not outcome.audit.agrees
        surely, more_surely = self._share(SURE), self._share(SURER)
        if surely.high < TARGET:
            self._go(max(LEAST, self.ratio * STEP))
        elif more_surely.low > TARGET:
            self._go(min(MOST, self.ratio / STEP))

    def _share(self, quantile: float) -> Interval:
        """The share of the first tokens that differ. Those that follow from exact KV do not, and on a busy engine only
        answers in doubt are compared: so what is compared stands for all that follow from approximate KV."""
        differing = wilson(self._differing, self._compared, quantile)
        approximate = wilson(self._approximate, self._first, quantile)
        return Interval(differing.low * approximate.low, differing.high * approximate.high)

    def _forget(self) -> None:
        self._first = self._approximate = 0
        """The first tokens of answers with this ratio, and those of them that follow from approximate KV."""
        self._compared = self._differing = 0
        """Those of them that were compared, and those that differ from what exact KV says."""

    def _go(self, ratio: float) -> None:
        if ratio == self.ratio:
            return
        log.info(
            "recompute_ratio: %.3f of the moved text instead of %.3f, because %d of %d tokens differed",
            ratio, self.ratio, self._differing, self._compared,
        )  # fmt: skip
        self.ratio = ratio
        self._forget()
