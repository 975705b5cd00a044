"""Counts what a hub has done and what its engines audited, and times its requests."""

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from itertools import accumulate

RECENT = 512
"""The number of the last audits of a namespace from which its present agreement is computed."""

BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
ALWAYS_SHOWN = ("lookups_that_found", "tokens_exact", "tokens_settled", "tokens_moved")


class Latencies:
    """How long the requests of one kind took: how many took at most each bound of ``BUCKETS_S``, or more."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._numbers = [0] * (len(BUCKETS_S) + 1)

    def add(self, seconds: float) -> None:
        self.total_s += seconds
        self._numbers[bisect_left(BUCKETS_S, seconds)] += 1

    @property
    def within(self) -> list[int]:
        """How many requests took at most each of the bounds; the last number counts all."""
        return list(accumulate(self._numbers))

    def quantile(self, share: float) -> float:
        """The bound within which this share of the requests was answered; the largest if that was not enough."""
        within = self.within
        return BUCKETS_S[min(bisect_left(within, share * within[-1]), len(BUCKETS_S) - 1)]


class Counters:
    """Totals by name, and latencies by kind of request."""

    def __init__(self, reads: Latencies) -> None:
        """``reads``: of the store, which counts them."""
        # A counter is shown from the hub's start, at 0: monitoring computes rates from its first value.
        self.totals = Counter(dict.fromkeys(ALWAYS_SHOWN, 0))
        self.requests: defaultdict[str, Latencies] = defaultdict(Latencies)
        self.reads = reads
        self.audits: defaultdict[str, Audits] = defaultdict(Audits)
        """By the digest of an engine's namespace."""


class Audits:
    """The audits of one namespace."""

    def __init__(self) -> None:
        self.audits = 0
        self.disagreements = 0
        self.recent: deque[bool] = deque(maxlen=RECENT)

    def add(self, *, agrees: bool) -> None:
        self.audits += 1
        self.disagreements += not agrees
        self.recent.append(agrees)

    def numbers(self) -> dict[str, float]:
        return {
            "audits": self.audits,
            "audit_disagreements": self.disagreements,
            "recent_audits": len(self.recent),
            "recent_audit_disagreements": self.recent.count(False),
        }
