"""Counts what a hub has done, and times its requests."""

from collections import Counter, defaultdict, deque
from functools import partial

from blendhub.hub.audits import AuditTable

RECENT = 512
"""The number of the last requests of a kind from which latencies are computed."""

ALWAYS_SHOWN = ("lookups_that_found", "tokens_exact", "tokens_settled", "tokens_moved", "tokens_learned")


class Counters:
    """Totals by name, and recent latencies by kind of request."""

    def __init__(self) -> None:
        # A counter is shown from the hub's start, at 0: monitoring computes rates from its first value.
        self.totals = Counter(dict.fromkeys(ALWAYS_SHOWN, 0))
        self.requests: defaultdict[str, int] = defaultdict(int)
        self.audits = AuditTable()
        self._seconds: defaultdict[str, deque[float]] = defaultdict(partial(deque, maxlen=RECENT))

    def record(self, kind: str, seconds: float) -> None:
        """Count an answered request and how long it took."""
        self.requests[kind] += 1
        self._seconds[kind].append(seconds)

    def latencies(self) -> dict[str, float]:
        """Median and 99th percentile in seconds, by kind of request."""
        latencies = {}
        for kind, seconds in self._seconds.items():
            ordered = sorted(seconds)
            latencies[f"seconds_{kind}_p50"] = ordered[len(ordered) // 2]
            latencies[f"seconds_{kind}_p99"] = ordered[len(ordered) * 99 // 100]
        return latencies
