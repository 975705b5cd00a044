"""The adapter's metrics on vLLM's ``/metrics``.

Their names begin with ``vllm:``, like those of vLLM and of other connectors: vLLM removes the metrics of an engine that
has ended by this prefix.
"""

from bisect import bisect_left
from typing import Any

import prometheus_client
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, PromMetric, PromMetricT

from blendhub.vllm.watching.stats import AUDITS, FIRST_TOKEN, AuditRecord

PREFIX = "vllm:blendhub_"
COUNTERS: dict[str, str] = {
    "requests_blended": "Requests that loaded moved text or settled KV.",
    "requests_exact": "Requests that reused only exact text.",
    "requests_with_holes": "Requests that computed tokens between reused ones.",
    "loads_failed": "Requests whose stored KV could not be loaded.",
    "tokens_exact": "Tokens reused exactly.",
    "tokens_settled": "Tokens reused as they were blended before.",
    "tokens_moved": "Tokens reused at another position or behind other text.",
    "tokens_recomputed": "Moved tokens that were recomputed.",
    "tokens_in_holes": "Tokens between reused ones that were computed.",
    "saved_tokens": "Tokens whose KV was stored.",
    "requests_repaired": "Requests whose approximate KV was all computed anew.",
    "tokens_repaired": "Tokens that repairs computed anew, also of repairs that were given up.",
    "answers_held": "Answers of which a token in doubt waited.",
    "answers_held_differing": "Those of them where exact KV said another token.",
    "tokens_doubted": "Tokens in doubt that did not wait, because of doubt_pause_s.",
}
"""The counters without a label."""

LABELLED: dict[str, tuple[str, str, str]] = {
    "refused_": ("requests_without_reuse", "reason", "Requests that reused nothing, by reason."),
    "tokens_loaded_": (
        "tokens_loaded",
        "source",
        "Tokens whose KV was loaded, by source: this engine's blocks, the hub's memory or its store.",
    ),
    "saves_failed_": ("saves_failed", "reason", "Saves that failed, by error."),
    "repairs_ended_": ("repairs_ended_early", "reason", "Repairs that ended before all KV was exact, by reason."),
    "answer_tokens_compared_": (
        "answer_tokens_compared",
        "position",
        "Tokens of repaired answers that were compared with what exact KV says, by position.",
    ),
    "answer_tokens_differing_": ("answer_tokens_differing", "position", "Those of them that differ."),
    "reservations_failed_": ("reservations_failed", "reason", "Reservations of slots that failed, by error."),
}
"""The counters whose names end with a label: the beginning of the name, the metric, the label, the help text."""

SECONDS: dict[str, str] = {
    "lookup_seconds": "Time from a lookup until its answer was used.",
    "load_seconds": "Time from the start of a load until its KV was copied.",
    "blend_seconds": "Time for choosing and recomputing tokens of a request.",
    "probe_seconds": "Time for choosing the tokens of a request.",
    "recompute_seconds": "Time for computing chosen tokens and the holes of a request.",
    "held_seconds": "Time for which a token in doubt waited.",
    "save_seconds": "Time from the start of a save until the hub had committed it.",
}
"""The histograms without a label."""

FIRST_TOKENS = "Time from arrival to the first token, by reuse: none, exact, or blended."
OF_AUDITS: dict[str, str] = {
    "audits": "Blended requests that were audited.",
    "audit_disagreements": "Audited requests whose likeliest first token differs.",
}
DIVERGENCE = "How far the first token's prediction is off in an audit, in nats."
EXPECTED = "The setting expected_agreement."

BANDS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
KL_BUCKETS = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
S_BUCKETS = (5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class BlendHubMetrics(KVConnectorPromMetrics):
    """The counts, times and audits for Prometheus."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter: Any = metric_types[prometheus_client.Counter]
        gauge: Any = metric_types[prometheus_client.Gauge]
        histogram: Any = metric_types[prometheus_client.Histogram]
        self._plain = {name: counter(PREFIX + name, about, labelnames) for name, about in COUNTERS.items()}
        self._labelled = {
            start: counter(PREFIX + name, about, [*labelnames, label])
            for start, (name, label, about) in LABELLED.items()
        }
        self._seconds = {
            name: histogram(PREFIX + name, about, labelnames, buckets=S_BUCKETS) for name, about in SECONDS.items()
        }
        self._first_token = histogram(PREFIX + FIRST_TOKEN, FIRST_TOKENS, [*labelnames, "reuse"], buckets=S_BUCKETS)
        self._expected = gauge(
            f"{PREFIX}expected_agreement_ratio", EXPECTED, [*labelnames, "namespace"], multiprocess_mode="mostrecent"
        )
        of_audit = [*labelnames, "namespace", "ratio"]
        self._audits, self._disagreements = (
            counter(PREFIX + name, about, of_audit) for name, about in OF_AUDITS.items()
        )
        self._kl = histogram(f"{PREFIX}audit_kl", DIVERGENCE, of_audit, buckets=KL_BUCKETS)
        # Shown from the start, at 0: monitoring computes rates from the first value.
        for labels in per_engine_labelvalues.values():
            for metric in (*self._plain.values(), *self._seconds.values()):
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name == AUDITS:
                for audit in value:
                    self._observe_audit(AuditRecord(*audit), labels)
            elif name in self._plain:
                self._plain[name].labels(*labels).inc(value)
            elif name in self._seconds:
                for seconds in value:
                    self._seconds[name].labels(*labels).observe(seconds)
            elif name.startswith(FIRST_TOKEN):
                for seconds in value:
                    self._first_token.labels(*labels, name.removeprefix(f"{FIRST_TOKEN}_")).observe(seconds)
            else:
                for start, metric in self._labelled.items():
                    if name.startswith(start):
                        metric.labels(*labels, name.removeprefix(start)).inc(value)

    def _observe_audit(self, audit: AuditRecord, labels: list[object]) -> None:
        self._expected.labels(*labels, audit.namespace).set(audit.expected)
        labels = [*labels, audit.namespace, ratio_band(audit.ratio)]
        self._audits.labels(*labels).inc()
        # Zero, too: a share can be taken of a series only if it is there.
        self._disagreements.labels(*labels).inc(not audit.agrees)
        self._kl.labels(*labels).observe(audit.kl)


def ratio_band(ratio: float) -> str:
    """A few labels for all ratios, so that requests with ratios of their own make no more metrics."""
    above = bisect_left(BANDS, ratio)
    return f"{BANDS[above - 1]:g}-{BANDS[above]:g}" if above else "0"
