"""Whether a running hub can be reached from here, and what its numbers say."""

import os
import time
from collections.abc import Iterator

from blendhub.client.hub_client import HubClient
from blendhub.client.wire import HubStats
from blendhub.core.errors import BlendHubError, DeadlineExceeded, PeerGone, VersionMismatch
from blendhub.tools.doctor.access import quoted
from blendhub.tools.doctor.circumstances import Circumstances
from blendhub.tools.doctor.finding import Finding, fail, ok, warn
from blendhub.tools.doctor.self_test import SPACE

TIMEOUT_S = 5.0
SLOW_S = 0.05
"""An answer this late costs a request more than the lookup saves of a short prompt."""

SAMPLES = 20
FEW = 100
"""The number of lookups below which their share of hits means nothing."""


def endpoint(at: Circumstances) -> Iterator[Finding]:
    if not at.endpoint:
        return
    try:
        with HubClient(at.endpoint, at.transport.name, at.transport.options, host=at.host, timeout=TIMEOUT_S) as client:
            stats, seconds = _asked(client)
            yield _reached(at.endpoint, seconds)
            yield from trouble_in(stats)
            yield from _mapped(client)
    except VersionMismatch as error:
        yield fail(f"the hub at {at.endpoint} speaks another version: {error}", "pip install --upgrade blendhub")
    except (PeerGone, DeadlineExceeded) as error:
        yield fail(f"no hub answers at {at.endpoint}: {error}", f"blendhub serve --endpoint {quoted(at.endpoint)}")
    except BlendHubError as error:
        yield fail(f"the hub at {at.endpoint} cannot be used: {error}", "blendhub top --once --help")


def _asked(client: HubClient) -> tuple[HubStats, float]:
    """The hub's numbers, and the median of the seconds that the hub took to answer."""
    times = []
    for _ in range(SAMPLES):
        started = time.perf_counter()
        stats = client.stats()
        times.append(time.perf_counter() - started)
    return stats, sorted(times)[SAMPLES // 2]


def _reached(where: str, seconds: float) -> Finding:
    answered = f"the hub at {where} answers within {seconds * 1e3:.1f} ms"
    if seconds > SLOW_S:
        return warn(f"{answered}, which is late", f"blendhub top --endpoint {quoted(where)}")
    return ok(answered)


def trouble_in(stats: HubStats) -> Iterator[Finding]:
    """Findings about a hub's counters and gauges that an operator should know."""
    count, gauge = stats.counters, stats.gauges
    if failures := count.get("store_failures"):
        yield warn(f"its store failed {failures:,.0f} times; its log has the reasons", "df -h")
    if corrupted := count.get("store_corrupted"):
        yield warn(f"{corrupted:,.0f} entries of its store were damaged, and dropped", "smartctl --all /dev/sda")
    if quarantined := gauge.get("arena_quarantined_bytes"):
        yield warn(
            f"{quarantined / 2**20:,.0f} MiB of its arena wait for a process that hangs in a write",
            "ps -eo pid,stat,wchan:32,args",
        )
    looked, found = count.get("requests_lookup", 0), count.get("lookups_that_found", 0)
    if forgotten := count.get("forgotten_chunks"):
        yield warn(
            f"{forgotten:,.0f} chunks were evicted that no store had: its arena of "
            f"{gauge.get('arena_bytes', 0) / 2**30:.2f} GiB is too small for what is asked for",
            f"blendhub serve --arena-gib {max(1, round(2 * gauge.get('arena_bytes', 0) / 2**30))} --store DIR",
        )
    if looked >= FEW and not found:
        yield warn(f"none of {looked:,.0f} lookups found anything", "blendhub explain --help")


def _mapped(client: HubClient) -> Iterator[Finding]:
    """Whether this machine can map the hub's arena, as engines must."""
    client.register(f"blendhub-doctor-{os.getpid()}", SPACE)
    if client.arena is None:
        yield warn(
            f"engines here cannot use its arena: {client.arena_trouble}",
            "docker run --ipc=host ...",
        )
    else:
        yield ok(f"its arena of {client.arena.name.size / 2**30:.2f} GiB can be mapped here")
