"""What the adapter counts and times, on its way from vLLM's scheduler to its log and its metrics endpoint."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from blendhub.core.spans import total
from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import LoadResult

AUDITS = "audits"
"""The name of the list of audits, which has the fields of an ``AuditRecord`` for each audit."""

FIRST_TOKEN = "time_to_first_token_seconds"
"""The beginning of the names of these times; each ends with the reuse of its requests."""

MAX_TIMES = 4096
"""Times of one kind that wait for vLLM to fetch its metrics; without metrics it fetches none."""


class Times:
    """The seconds that things took, by name. Called by the scheduler's thread."""

    def __init__(self) -> None:
        self._taken = self._empty()

    def add(self, name: str, *seconds: float) -> None:
        self._taken[name].extend(seconds)

    def take(self) -> dict[str, list[float]]:
        """The times since the last call."""
        taken, self._taken = self._taken, self._empty()
        return {name: list(times) for name, times in taken.items() if times}

    @staticmethod
    def _empty() -> defaultdict[str, deque[float]]:
        return defaultdict(partial(deque[float], maxlen=MAX_TIMES))


def counts_of_load(decision: Decision, result: LoadResult) -> dict[str, int]:
    """What the load of a request's KV counts, by counter."""
    if result.error:
        return {"loads_failed": 1}
    moved, settled = total(decision.moved), total(decision.settled)
    return {
        "requests_blended" if moved or settled else "requests_exact": 1,
        "tokens_exact": total(decision.exact),
        "tokens_settled": settled,
        "tokens_moved": moved,
        "tokens_recomputed": total(result.recomputed),
        "requests_with_holes": int(result.holes > 0),
        "tokens_in_holes": result.holes,
    }


def times_of_load(decision: Decision, result: LoadResult) -> dict[str, float]:
    """How long each phase of a load took that it had, by histogram."""
    if result.error:
        return {}
    times = {"load_seconds": result.load_seconds}
    if decision.moved:
        times["probe_seconds"] = result.probe_seconds
    if decision.moved or decision.holes:
        times["recompute_seconds"] = result.recompute_seconds
        times["blend_seconds"] = result.probe_seconds + result.recompute_seconds
    return times


class AuditRecord(NamedTuple):
    """One audit, for the metrics."""

    namespace: str
    ratio: float
    agrees: bool
    kl: float
    expected: float
    """The engine's ``expected_agreement``."""


class BlendHubStats(KVConnectorStats):
    """The counts since the last call, by counter; the times, by histogram; and the audits."""

    @classmethod
    def taken_from(
        cls, counters: "Counter[str]", times: Times | None = None, audits: Sequence[AuditRecord] = ()
    ) -> "BlendHubStats | None":
        """What was counted since the last call; None if nothing was. For the scheduler's thread, which counts."""
        taken: dict[str, Any] = {name: count for name, count in counters.items() if count}
        counters.clear()
        if times:
            taken |= times.take()
        if audits:
            taken[AUDITS] = list(map(list, audits))
        return cls(taken) if taken else None

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "BlendHubStats":
        for name, count in other.data.items():
            self.data[name] = self.data[name] + count if name in self.data else count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Sums of counts and of seconds."""
        sums = dict(self.data)
        if audits := [AuditRecord(*fields) for fields in sums.pop(AUDITS, [])]:
            sums |= {AUDITS: len(audits), "audit_disagreements": sum(not audit.agrees for audit in audits)}
        return {name: sum(of) if isinstance(of, list) else of for name, of in sorted(sums.items())}

    def is_empty(self) -> bool:
        return not self.data
