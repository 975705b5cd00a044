"""The text of `/metrics` for Prometheus: each number of the hub with its type and its meaning."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from blendhub.client.wire import HubStats
from blendhub.hub.counters import BUCKETS_S, Counters, Latencies
from blendhub.outcome.agreement import wilson

PREFIX = "blendhub_"
COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "lookups_that_found": "Lookups that found something; divided by all lookups, this is the hit rate",
        "tokens_exact": "Tokens found at the same position after the same tokens",
        "tokens_settled": "Tokens found after the same tokens, whose KV is approximate",
        "tokens_moved": "Tokens found at another position or after other tokens",
        "evictions": "Chunks that left the arena to make room",
        "forgotten_chunks": "Evicted chunks that no store had",
        "store_saves": "Chunks saved to the store",
        "store_loads": "Chunks loaded from the store",
        "store_skipped": "Chunks evicted before the store had them",
        "store_failures": "Failed operations of the store",
        "store_corrupted": "Damaged entries that the store dropped",
        "fleet_published_chunks": "Chunks of other hubs that became matchable here",
        "fleet_dropped_chunks": "Chunks that other hubs dropped",
        "fleet_snapshots": "How often the hub read the whole catalogue",
        "fleet_failures": "Failed calls to follow the catalogue's log",
        "fleet_refused_runs": "Runs of the catalogue that this hub cannot use",
    }
)
GAUGES: Mapping[str, str] = MappingProxyType(
    {
        "arena_bytes": "Size of the arena",
        "arena_reserved_bytes": "Reserved bytes of the arena",
        "arena_free_bytes": "Free bytes of what is reserved",
        "arena_missing_bytes": "Bytes for which memory did not suffice",
        "arena_quarantined_bytes": "Bytes of revoked slots that a process may still write into",
        "chunks": "Matchable chunks",
        "chunks_in_arena": "Matchable chunks in memory",
        "matcher_bytes": "Memory of the matchers",
        "sessions": "Registered processes",
        "engines": "Engines of the registered processes",
        "read_leases": "Leases to read",
        "write_leases": "Leases to write",
        "oldest_read_lease_seconds": "Age of the oldest lease to read; if it only grows, a client leaks them",
        "oldest_write_lease_seconds": "Age of the oldest lease to write; if it only grows, a client leaks them",
        "store_bytes": "Bytes in the store",
        "store_waiting_chunks": "Chunks that wait to be saved",
        "fleet_hubs": "Live hubs of the fleet, including this one",
        "fleet_behind": "Changes of the fleet still to be applied",
        "fleet_in_step": "1 while the shared store answers, 0 while the hub serves alone",
    }
)
OF_NAMESPACE: Mapping[str, str] = MappingProxyType(
    {
        "namespace_variants": "Variants of a model, each a LoRA adapter with a salt",
        "namespace_runs": "Stored runs of a model",
        "namespace_chunks": "Stored chunks of a model",
        "namespace_tokens": "Stored tokens of a model",
        "namespace_recent_audits": "The last audits of a model, at most 512",
        "namespace_recent_audit_disagreements": "Those of them whose first tokens differed",
        "namespace_recompute_ratio": "Share of a model's moved text that is recomputed with recompute_ratio auto",
    }
)
"""The gauges with the label ``namespace``, the digest of a model's namespace."""

COUNTERS_OF_NAMESPACE: Mapping[str, str] = MappingProxyType(
    {
        "namespace_audits": "Audits of a model",
        "namespace_audit_disagreements": "Audits whose first tokens differed",
    }
)
AGREEMENT: Mapping[str, str] = MappingProxyType(
    {
        "namespace_agreement_ratio": "Share of a model's last audits whose first tokens were the same",
        "namespace_agreement_low_ratio": "Lower end of its 95% confidence interval",
        "namespace_agreement_high_ratio": "Upper end of its 95% confidence interval",
    }
)
"""The gauges of models that were audited."""

REFUSED = ("refused_requests", "Requests refused, by the class of the error")
HISTOGRAMS: Mapping[str, str] = MappingProxyType(
    {
        "request_seconds": "Time in the hub, by the kind of request",
        "store_read_seconds": "Time of the reads from the store or the fleet",
    }
)


def exposition(stats: HubStats, counters: Counters) -> bytes:
    """The numbers in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Collector(stats, counters))
    return generate_latest(registry)


class _Collector:
    """Hands the numbers to Prometheus' client for one answer."""

    def __init__(self, stats: HubStats, counters: Counters) -> None:
        self._stats = stats
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        yield from self._totals()
        for name, value in sorted(self._stats.gauges.items()):
            if meaning := GAUGES.get(name):
                yield GaugeMetricFamily(PREFIX + name, meaning, value)
        yield from self._of_namespaces()
        yield self._histogram("request_seconds", self._counters.requests, "kind")
        yield self._histogram("store_read_seconds", {"": self._counters.reads})

    def _totals(self) -> Iterator[Metric]:
        name, meaning = REFUSED
        refused = CounterMetricFamily(PREFIX + name, meaning, labels=["error"])
        for name, value in sorted(self._stats.counters.items()):
            kind, _, rest = name.partition("_")
            if kind == "refused":
                refused.add_metric([rest], value)
            elif kind != "requests":  # the histogram of their times counts them
                # Stores of others count what they like.
                meaning = COUNTERS.get(name) or f"Counted by the shared store: {name.replace('_', ' ')}"
                yield CounterMetricFamily(PREFIX + name, meaning, value)
        yield refused

    def _of_namespaces(self) -> Iterator[Metric]:
        numbers = sorted(self._stats.namespaces.items())
        for name, meaning in OF_NAMESPACE.items():
            family = GaugeMetricFamily(PREFIX + name, meaning, labels=["namespace"])
            for digest, of_namespace in numbers:
                family.add_metric([digest], of_namespace[name.removeprefix("namespace_")])
            yield family
        for name, meaning in COUNTERS_OF_NAMESPACE.items():
            total = CounterMetricFamily(PREFIX + name, meaning, labels=["namespace"])
            for digest, of_namespace in numbers:
                total.add_metric([digest], of_namespace[name.removeprefix("namespace_")])
            yield total
        families = [
            GaugeMetricFamily(PREFIX + name, meaning, labels=["namespace"]) for name, meaning in AGREEMENT.items()
        ]
        for digest, of_namespace in numbers:
            if audits := of_namespace["recent_audits"]:
                agreed = audits - of_namespace["recent_audit_disagreements"]
                for family, value in zip(families, (agreed / audits, *wilson(agreed, audits)), strict=True):
                    family.add_metric([digest], value)
        yield from families

    def _histogram(self, name: str, latencies: Mapping[str, Latencies], *label: str) -> Metric:
        seconds = HistogramMetricFamily(PREFIX + name, HISTOGRAMS[name], labels=label)
        for kind, of_kind in latencies.items():
            buckets = list(zip([*map(str, BUCKETS_S), "+Inf"], of_kind.within, strict=True))
            seconds.add_metric([kind] if label else [], buckets, of_kind.total_s)
        return seconds
