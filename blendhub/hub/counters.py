"""Counts what a hub has done and what its engines audited, and times its requests."""

from collections import Counter, defaultdict, deque
from functools import partial

from prometheus_client import Histogram

from blendhub.hub.limits import MOST_AUDITED_NAMESPACES

RECENT = 512
"""The number of the last requests of a kind from which latencies are computed, and of the last audits of a namespace
from which its present agreement is computed."""

BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
ALWAYS_SHOWN = ("lookups_that_found", "tokens_exact", "tokens_settled", "tokens_moved")


class Counters:
    """Totals by name, and latencies by kind of request."""

    def __init__(self) -> None:
        # A counter is shown from the hub's start, at 0: monitoring computes rates from its first value.
        self.totals = Counter(dict.fromkeys(ALWAYS_SHOWN, 0))
        self.requests: defaultdict[str, int] = defaultdict(int)
        self.audits = AuditTable()
        self.seconds = Histogram(
            "blendhub_request_seconds", "Time in the hub by kind of request", ["kind"], registry=None, buckets=BUCKETS_S
        )
        self._of_kinds: dict[str, Histogram] = {}
        self._recent: defaultdict[str, deque[float]] = defaultdict(partial(deque, maxlen=RECENT))

    def record(self, kind: str, seconds: float) -> None:
        """Count an answered request and how long it took."""
        self.requests[kind] += 1
        self._recent[kind].append(seconds)
        if kind not in self._of_kinds:
            self._of_kinds[kind] = self.seconds.labels(kind)
        self._of_kinds[kind].observe(seconds)

    def latencies(self) -> dict[str, float]:
        """Median and 99th percentile of the last requests in seconds, by kind, for `blendhub top` and the page."""
        latencies = {}
        for kind, seconds in self._recent.items():
            ordered = sorted(seconds)
            latencies[f"seconds_{kind}_p50"] = ordered[len(ordered) // 2]
            latencies[f"seconds_{kind}_p99"] = ordered[len(ordered) * 99 // 100]
        return latencies


class _Audits:
    def __init__(self) -> None:
        self.audits = 0
        self.disagreements = 0
        self.recent: deque[bool] = deque(maxlen=RECENT)


class AuditTable:
    """Counts by the digest of an engine's namespace."""

    def __init__(self) -> None:
        self.namespaces: dict[str, _Audits] = {}
        """The audits by namespace; the namespace that was silent longest comes first."""

    def add(self, namespace: str, agreed: int, disagreed: int) -> None:
        counts = self.namespaces.pop(namespace, None) or _Audits()
        self.namespaces[namespace] = counts
        if len(self.namespaces) > MOST_AUDITED_NAMESPACES:
            del self.namespaces[next(iter(self.namespaces))]
        counts.audits += agreed + disagreed
        counts.disagreements += disagreed
        counts.recent.extend(disagreed * [False] + agreed * [True])

    def of(self, namespace: str) -> dict[str, float]:
        counts = self.namespaces.get(namespace) or _Audits()
        return {
            "audits": counts.audits,
            "audit_disagreements": counts.disagreements,
            "recent_audits": len(counts.recent),
            "recent_audit_disagreements": counts.recent.count(False),
        }
