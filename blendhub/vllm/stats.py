"""The adapter's counters, on vLLM's metrics endpoint and in its log."""

from collections import Counter
from typing import Any

import prometheus_client
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

COUNTERS: dict[str, str] = {
    "requests_blended": "Requests for which moved text was reused.",
    "requests_exact": "Requests for which only exact text was reused.",
    "loads_failed": "Requests whose stored KV could not be loaded, so vLLM computed it.",
    "tokens_exact": "Tokens reused at the position where they were computed.",
    "tokens_moved": "Tokens reused at another position than where they were computed.",
    "tokens_recomputed": "Moved tokens that were recomputed.",
    "tokens_in_holes": "Tokens between reused ones that were computed.",
    "lookup_microseconds": "Time from the begin of lookups until their answers were used, in microseconds.",
    "load_microseconds": "Time from the begin of loads until their KV was copied, in microseconds.",
    "blend_microseconds": "Time spent on choosing and recomputing tokens, in microseconds.",
    "probe_microseconds": "The part of it spent on choosing the tokens, in microseconds.",
    "recompute_microseconds": "The part of it spent on computing them and the holes, in microseconds.",
    "saved_tokens": "Tokens whose KV was stored.",
    "learned_tokens": "Tokens computed anew of which the hub learned how much their KV had changed.",
    "unlearned_tokens": "Tokens computed anew of which the hub did not learn it, though that was meant to be.",
    "save_microseconds": "Time from the begin of saves until the hub had committed them, in microseconds.",
}
"""The counters without a label."""

LABELLED: dict[str, tuple[str, str]] = {
    "refused_": ("requests_without_reuse", "Requests for which nothing was reused, by reason."),
    "saves_failed_": ("saves_failed", "Saves that failed, by error."),
    "reservations_failed_": ("reservations_failed", "Reservations of slots that failed, by error."),
}
"""The counters whose names end with a reason: the beginning of the name, the metric, its help text."""


class BlendHubStats(KVConnectorStats):
    """Counts since the last call, by counter."""

    @classmethod
    def taken_from(cls, counters: "Counter[str]") -> "BlendHubStats | None":
        taken = {name: count for name, count in counters.items() if count}
        # Another thread counts too: its counts must not be lost.
        counters.subtract(taken)
        return cls(taken) if taken else None

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "BlendHubStats":
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data


class BlendHubMetrics(KVConnectorPromMetrics):
    """The same as ``vllm:blendhub_...`` for Prometheus."""

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
            start: counter(f"vllm:blendhub_{name}", about, [*labelnames, "reason"])
            for start, (name, about) in LABELLED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            if name in self._plain:
                self._plain[name].labels(*labels).inc(count)
                continue
            for start, metric in self._labelled.items():
                if name.startswith(start):
                    metric.labels(*labels, name.removeprefix(start)).inc(count)
