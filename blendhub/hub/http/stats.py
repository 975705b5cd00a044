"""The counters and gauges that `Stats` requests show, and the text of `/metrics` for Prometheus."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from blendhub.client.wire import HubStats
from blendhub.hub.counters import BUCKETS_S, Counters
from blendhub.hub.state import HubState
from blendhub.hub.stores.follower import Follower
from blendhub.hub.stores.store_tier import StoreTier

PREFIX = "blendhub_"
STORED = ("variants", "runs", "chunks", "tokens")


def collect_stats(
    state: HubState, tier: StoreTier | None, counters: Counters, follower: Follower | None = None
) -> HubStats:
    sums = state.indexes.sums()
    return HubStats(
        epoch=state.sessions.epoch,
        counters={**_totals(state, tier, counters), **_fleet_totals(follower)},
        gauges={
            **_gauges(state, tier),
            **_fleet_gauges(follower),
            "chunks": sum(of_base["chunks"] for of_base in sums.values()),
            "matcher_bytes": sum(of_base["matcher_bytes"] for of_base in sums.values()),
            **_quantiles(counters),
        },
        namespaces={
            base: {**{name: sums[base][name] if base in sums else 0 for name in STORED}, **counters.audits.of(base)}
            for base in {**sums, **counters.audits.namespaces}
        },
    )


def _totals(state: HubState, tier: StoreTier | None, counters: Counters) -> dict[str, float]:
    return {
        **counters.totals,
        **{f"requests_{kind}": latencies.within[-1] for kind, latencies in counters.requests.items()},
        "evictions": state.cache.evictions,
        "forgotten_chunks": state.cache.forgotten,
        "keeps_refused": state.cache.policy.kept.refused,
        "index_evictions": state.index_limit.evictions,
        "store_saves": tier.writer.saved if tier else 0,
        "store_loads": tier.reader.loaded if tier else 0,
        "store_skipped": tier.writer.skipped if tier else 0,
        "store_failures": tier.failures if tier else 0,
        "store_corrupted": tier.store.corrupted if tier else 0,
    }


def _gauges(state: HubState, tier: StoreTier | None) -> dict[str, float]:
    arena, quarantined = state.cache.arena, state.writes.quarantined.values()
    return {
        "arena_bytes": arena.progress.goal,
        "arena_reserved_bytes": arena.progress.reserved,
        "arena_missing_bytes": arena.name.size - arena.progress.goal,
        "arena_free_bytes": arena.extents.free_bytes,
        "arena_quarantined_bytes": sum(len(one.offsets) * one.size for one in quarantined),
        "chunks_in_arena": len(state.cache.policy),
        "sessions": len(state.sessions),
        "engines": state.sessions.n_engines,
        "read_leases": len(state.reads.leases),
        "write_leases": len(state.writes.leases),
        "store_bytes": tier.store.nbytes if tier else 0,
        "store_waiting_chunks": tier.writer.waiting if tier else 0,
        "store_later_chunks": tier.writer.later if tier else 0,
    }


def _quantiles(counters: Counters) -> dict[str, float]:
    """The seconds within which half, and nearly all, of the requests of a kind were answered."""
    return {
        f"seconds_{kind}_p{percent}": latencies.quantile(percent / 100)
        for kind, latencies in counters.requests.items()
        for percent in (50, 99)
    }


def _fleet_totals(follower: Follower | None) -> dict[str, float]:
    return {f"fleet_{name}": value for name, value in follower.figures().items()} if follower else {}


def _fleet_gauges(follower: Follower | None) -> dict[str, float]:
    """The gauges of a hub with a shared store; empty for other hubs."""
    if follower is None:
        return {}
    return {"fleet_hubs": follower.hubs, "fleet_behind": follower.behind, "fleet_in_step": float(follower.in_step)}


HELP: Mapping[str, str] = MappingProxyType(
    {
        "arena_bytes": "Size of the arena when all of it is reserved",
        "arena_free_bytes": "Free bytes of what is reserved of the arena",
        "arena_missing_bytes": "Bytes that the arena was to have, and for which memory did not suffice",
        "arena_quarantined_bytes": "Bytes of revoked slots that a process may still write into",
        "arena_reserved_bytes": "Bytes of the arena that are reserved by now",
        "chunks": "Matchable chunks",
        "chunks_in_arena": "Matchable chunks in memory",
        "evictions": "Chunks that left the arena to make room",
        "forgotten_chunks": "Evicted chunks that no store had",
        "index_evictions": "Chunks dropped because the index took too much memory beyond its KV",
        "lookups_that_found": "Lookups that found something",
        "matcher_bytes": "Memory of the matchers",
        "store_later_chunks": "Chunks that are saved when the store is available again",
        "store_skipped": "Chunks not saved because too many waited for the store",
        "store_waiting_chunks": "Chunks that wait to be saved",
        "tokens_exact": "Tokens found at the same position after the same tokens",
        "tokens_moved": "Tokens found at another position or after other tokens",
        "tokens_deleted": "Tokens that were deleted with their request or salt",
        "keeps_refused": "Chunks that were not kept as asked, because others took the share",
        "tokens_too_old": "Tokens stored too many moves from exact KV for an engine's max_generation",
        "tokens_settled": "Tokens found after the same tokens, blended before",
    }
)
"""The meanings of the numbers whose names do not say enough."""


class _Collector:
    """Hands the numbers to Prometheus' client for one answer."""

    def __init__(self, stats: HubStats, counters: Counters) -> None:
        self._stats = stats
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        for name, value in sorted(self._stats.counters.items()):
            yield CounterMetricFamily(PREFIX + name, _help(name), value)
        for name, value in sorted(self._stats.gauges.items()):
            if not name.startswith("seconds_"):  # the histogram says more
                yield GaugeMetricFamily(PREFIX + name, _help(name), value)
        for name in sorted({name for of_namespace in self._stats.namespaces.values() for name in of_namespace}):
            family = GaugeMetricFamily(f"{PREFIX}namespace_{name}", f"{_help(name)}, by model", labels=["namespace"])
            for digest, of_namespace in sorted(self._stats.namespaces.items()):
                family.add_metric([digest], of_namespace[name])
            yield family
        seconds = HistogramMetricFamily(
            f"{PREFIX}request_seconds", "Time in the hub by kind of request", labels=["kind"]
        )
        for kind, latencies in self._counters.requests.items():
            buckets = list(zip([*map(str, BUCKETS_S), "+Inf"], latencies.within, strict=True))
            seconds.add_metric([kind], buckets, latencies.total_s)
        yield seconds


def exposition(stats: HubStats, counters: Counters) -> bytes:
    """The numbers in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Collector(stats, counters))
    return generate_latest(registry)


def _help(name: str) -> str:
    kind, _, rest = name.partition("_")
    if kind in ("requests", "refused"):
        return f"Requests {'answered' if kind == 'requests' else 'refused'}: {rest}"
    return HELP.get(name, name.replace("_", " ").capitalize())
