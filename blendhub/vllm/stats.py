"""The adapter's counters, on vLLM's metrics endpoint and in its log."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import prometheus_client
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from blendhub.vllm.decision import Decision
from blendhub.vllm.messages import LoadResult
from blendhub.vllm.spans import total

COUNTERS: dict[str, str] = {
    "requests_blended": "Requests for which moved text or settled KV was loaded.",
    "requests_exact": "Requests for which only exact text was reused.",
    "requests_with_holes": "Requests for which tokens between reused ones were computed.",
    "loads_failed": "Requests whose stored KV could not be loaded, so vLLM computed it.",
    "tokens_exact": "Tokens reused at the position where they were computed.",
    "tokens_settled": "Tokens reused as they were blended before, behind the same text.",
    "tokens_moved": "Tokens reused at another position than where they were computed.",
    "tokens_recomputed": "Moved tokens that were recomputed.",
    "tokens_in_holes": "Tokens between reused ones that were computed.",
    "lookup_microseconds": "Time from the begin of lookups until their answers were used, in microseconds.",
    "load_microseconds": "Time from the begin of loads until their KV was copied, in microseconds.",
    "blend_microseconds": "Time spent on choosing and recomputing tokens, in microseconds.",
    "probe_microseconds": "Time spent on choosing the tokens to recompute, in microseconds.",
    "recompute_microseconds": "Time spent on computing these tokens and the holes, in microseconds.",
    "saved_tokens": "Tokens whose KV was stored.",
    "save_microseconds": "Time from the begin of saves until the hub had committed them, in microseconds.",
    "carried_bytes": "KV that went through the transport, because this machine cannot map the hub's memory, in bytes.",
}
"""The counters without a label."""

AUDITS = "audits"
"""The name of the list of audits, which has the fields of an ``AuditRecord`` for each audit."""

LABELLED: dict[str, tuple[str, str, str]] = {
    "refused_": ("requests_without_reuse", "reason", "Requests for which nothing was reused, by reason."),
    "saves_failed_": ("saves_failed", "reason", "Saves that failed, by error."),
    "reservations_failed_": ("reservations_failed", "reason", "Reservations of slots that failed, by error."),
    "generation_": ("requests_by_generation", "generation", "Blended requests, by the generation of their KV."),
}
"""The counters whose names end with a label: the beginning of the name, the metric, the label, the help text."""


OF_AUDITS: dict[str, str] = {
    "audits": "Blended requests that were audited.",
    "audit_disagreements": "Audited requests whose first tokens differ between blended and exact KV.",
}
DIVERGENCE = "A histogram of how far the first token's prediction from blended KV is off, in nats."

BANDS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
KL_BUCKETS = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


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
        "load_microseconds": round(result.load_seconds * 1e6),
        "blend_microseconds": round((result.probe_seconds + result.recompute_seconds) * 1e6),
        "probe_microseconds": round(result.probe_seconds * 1e6),
        "recompute_microseconds": round(result.recompute_seconds * 1e6),
    }


class AuditRecord(NamedTuple):
    """One audit, for the metrics."""

    namespace: str
    ratio: float
    agrees: bool
    kl: float
    generation: int


def ratio_band(ratio: float) -> str:
    """A few labels for all ratios, so that requests with ratios of their own make no more metrics."""
    above = bisect_left(BANDS, ratio)
    return f"{BANDS[above - 1]:g}-{BANDS[above]:g}" if above else "0"


class BlendHubStats(KVConnectorStats):
    """The counts since the last call, by counter, and the audits."""

    @classmethod
    def taken_from(cls, counters: "Counter[str]", audits: Sequence[AuditRecord] = ()) -> "BlendHubStats | None":
        taken: dict[str, Any] = {name: count for name, count in counters.items() if count}
        # Another thread counts too: its counts must not be lost.
        counters.subtract(taken)
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
        sums = dict(self.data)
        if audits := [AuditRecord(*one) for one in sums.pop(AUDITS, [])]:
            sums |= {AUDITS: len(audits), "audit_disagreements": sum(not one.agrees for one in audits)}
        return dict(sorted(sums.items()))

    def is_empty(self) -> bool:
        return not self.data


class BlendHubMetrics(KVConnectorPromMetrics):
    """The counts and audits as ``vllm:blendhub_...`` for Prometheus."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter: Any = metric_types[prometheus_client.Counter]
        self._plain = {name: counter(f"vllm:blendhub_{name}", about, labelnames) for name, about in COUNTERS.items()}
        self._labelled = {
            start: counter(f"vllm:blendhub_{name}", about, [*labelnames, label])
            for start, (name, label, about) in LABELLED.items()
        }
        labelnames = [*labelnames, "namespace", "ratio", "generation"]
        self._audits, self._disagreements = (
            counter(f"vllm:blendhub_{name}", about, labelnames) for name, about in OF_AUDITS.items()
        )
        histogram: Any = metric_types[prometheus_client.Histogram]
        self._kl = histogram("vllm:blendhub_audit_kl", DIVERGENCE, labelnames, buckets=KL_BUCKETS)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for audit in transfer_stats_data.get(AUDITS, []):
            self._observe_audit(AuditRecord(*audit), labels)
        for name, count in transfer_stats_data.items():
            if name in self._plain:
                self._plain[name].labels(*labels).inc(count)
                continue
            for start, metric in self._labelled.items():
                if name.startswith(start):
                    metric.labels(*labels, name.removeprefix(start)).inc(count)

    def _observe_audit(self, audit: AuditRecord, labels: list[object]) -> None:
        labels = [*labels, audit.namespace, ratio_band(audit.ratio), str(audit.generation)]
        self._audits.labels(*labels).inc()
        # Zero, too: a share can be taken of a series only if it is there.
        self._disagreements.labels(*labels).inc(not audit.agrees)
        self._kl.labels(*labels).observe(audit.kl)
