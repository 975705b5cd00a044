"""What a hub has done, in numbers: counted here, shown by whoever asks."""

from collections import Counter, defaultdict, deque
from functools import partial

RECENT = 512
"""Latencies are those of the last so many requests of a kind."""


class Counters:
    """Totals by name, and how long each kind of request took lately."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.requests: defaultdict[str, int] = defaultdict(int)
        self._seconds: defaultdict[str, deque[float]] = defaultdict(partial(deque, maxlen=RECENT))

    def took(self, kind: str, seconds: float) -> None:
        self.requests[kind] += 1
        self._seconds[kind].append(seconds)

    def latencies(self) -> dict[str, float]:
        """Median and 99th percentile in seconds, by kind of request."""
        shown = {}
        for kind, seconds in self._seconds.items():
            ordered = sorted(seconds)
            shown[f"seconds_{kind}_p50"] = ordered[len(ordered) // 2]
            shown[f"seconds_{kind}_p99"] = ordered[len(ordered) * 99 // 100]
        return shown
