"""The counters and gauges that `Stats` requests show."""

from blendhub.client.wire import HubStats
from blendhub.hub.counters import Counters
from blendhub.hub.ratios import Ratios
from blendhub.hub.state import HubState
from blendhub.hub.stores.follower import Follower
from blendhub.hub.stores.store_tier import StoreTier

STORED = ("variants", "runs", "chunks", "tokens")


def collect_stats(
    state: HubState,
    tier: StoreTier | None,
    counters: Counters,
    ratios: Ratios,
    now: float,
    follower: Follower | None = None,
) -> HubStats:
    sums = state.indexes.sums()
    arena, quarantined = state.cache.arena, state.writes.quarantined.values()
    totals: dict[str, float] = {
        **counters.totals,
        **{f"requests_{kind}": latencies.within[-1] for kind, latencies in counters.requests.items()},
        "evictions": state.cache.evictions,
        "forgotten_chunks": state.cache.forgotten,
        "store_saves": tier.writer.saved if tier else 0,
        "store_loads": tier.reader.loaded if tier else 0,
        "store_skipped": tier.writer.skipped if tier else 0,
        "store_failures": tier.failures if tier else 0,
        "store_corrupted": tier.store.corrupted if tier else 0,
    }
    gauges: dict[str, float] = {
        "arena_bytes": arena.progress.goal,
        "arena_reserved_bytes": arena.progress.reserved,
        "arena_missing_bytes": arena.name.size - arena.progress.goal,
        "arena_free_bytes": arena.extents.free_bytes,
        "arena_quarantined_bytes": sum(size for quarantine in quarantined for _, size in quarantine.slots),
        "chunks": sum(of_base["chunks"] for of_base in sums.values()),
        "chunks_in_arena": len(state.cache.policy),
        "matcher_bytes": sum(of_base["matcher_bytes"] for of_base in sums.values()),
        "sessions": len(state.sessions),
        "engines": len(state.sessions.engines()),
        "read_leases": len(state.reads.leases),
        "write_leases": len(state.writes.leases),
        "oldest_read_lease_seconds": state.reads.leases.oldest_age(now),
        "oldest_write_lease_seconds": state.writes.leases.oldest_age(now),
        "store_bytes": tier.store.nbytes if tier else 0,
        "store_waiting_chunks": tier.writer.waiting if tier else 0,
        # The seconds within which half, and nearly all, of the requests of a kind were answered.
        **{
            f"seconds_{kind}_p{percent}": latencies.quantile(percent / 100)
            for kind, latencies in counters.requests.items()
            for percent in (50, 99)
        },
    }
    if follower:
        totals |= {f"fleet_{name}": value for name, value in follower.figures().items()}
        gauges |= {"fleet_hubs": follower.hubs, "fleet_behind": follower.behind}
        gauges["fleet_in_step"] = float(follower.in_step)
    namespaces = {
        base: {
            **{name: float(sums[base][name]) if base in sums else 0.0 for name in STORED},
            **counters.audits[base].numbers(),
            "recompute_ratio": ratios.of(base),
        }
        for base in {**sums, **counters.audits}
    }
    return HubStats(epoch=state.sessions.epoch, counters=totals, gauges=gauges, namespaces=namespaces)
