"""A hub in a child process that is tested, and a running hub that is asked."""

import os
import time
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from blendhub.client.arena_view import SHM
from blendhub.client.hub_client import HubClient
from blendhub.client.wire import HubStats
from blendhub.core.errors import BlendHubError, DeadlineExceeded, HubError, PeerGone, PluginError, VersionMismatch
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.spans import Match, Span
from blendhub.core.tokens import Tokens
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import embedded_hub
from blendhub.tools.doctor.files import as_root, quoted
from blendhub.tools.doctor.finding import Circumstances, Finding, fail, ok, warn

Chunks: TypeAlias = npt.NDArray[np.uint8]
LAYOUT = KVLayout(layers=4, kv_heads=4, key_dim=64, value_dim=64, dtype="float16")
SPACE = Namespace(model="blendhub doctor", layout=LAYOUT)
N_CHUNKS = 16
ARENA_BYTES = int(1.5 * N_CHUNKS * SPACE.slot_bytes)
"""Half as much again as the chunks that are stored."""

TIMEOUT_S = 5.0


def self_test(at: Circumstances) -> Iterator[Finding]:
    room = os.statvfs(SHM)
    if room.f_bavail * room.f_frsize < ARENA_BYTES:
        yield fail(
            f"{SHM} has no room for an arena of {ARENA_BYTES / 2**20:.0f} MiB, with which to test a hub",
            as_root(f"mount -o remount,size={2 * ARENA_BYTES // 2**20}M {SHM}"),
        )
        return
    config = HubConfig(arena_gib=ARENA_BYTES / 2**30, metrics="")
    try:
        with embedded_hub(config, "process", at.host) as hub, hub.connect() as client:
            yield _stores_and_gives_back(client)
    except PluginError as error:
        yield fail(f"no hub can be started here: {error}", "pip install --upgrade 'blendhub[cpu]'")
    except BlendHubError as error:
        yield fail(f"no hub works here: {error}", "pip install --force-reinstall blendhub blendhub-transports")


def _stores_and_gives_back(client: HubClient) -> Finding:
    tokens = np.arange(N_CHUNKS * LAYOUT.chunk_tokens, dtype=np.uint32)
    kv = np.random.default_rng().integers(0, 255, (N_CHUNKS, LAYOUT.shard_bytes), np.uint8)
    started = time.perf_counter()
    client.register("blendhub-doctor", SPACE, rank=0)
    reserved = client.reserve(tokens, Span(0, len(tokens)))
    if reserved.right is None or len(reserved.slots) != len(kv):
        raise HubError(f"the hub gave {len(reserved.slots)} slots for {len(kv)} chunks")
    with client.writing(reserved.right):
        for slot, chunk in zip(reserved.slots, kv, strict=True):
            client.shard(slot.slot)[:] = chunk
    client.commit(reserved.right, reserved.span.end)
    # Once where it was, and once behind other text.
    other = np.arange(10**6, 10**6 + 100, dtype=np.uint32)
    _find(client, tokens, 0, kv)
    _find(client, np.concatenate([other, tokens]), len(other), kv)
    took = time.perf_counter() - started
    return ok(f"a hub stored {len(tokens):,} tokens and gave them back, moved too, within {took:.1f} s")


def _find(client: HubClient, prompt: Tokens, start: int, kv: Chunks) -> None:
    """Look the chunks up, and read them. Raises HubError unless all are as written."""
    found = client.lookup(prompt)
    wanted = Span(start, start + kv.shape[0] * LAYOUT.chunk_tokens)
    if not _covers(found.matches, wanted):
        raise HubError(f"stored tokens {wanted} were not found; found {found.matches}")
    with client.reading(found) as pieces:
        slots = dict.fromkeys(piece.shard for piece in pieces)
        read = np.stack([client.shard(slot) for slot in slots])
    if not np.array_equal(read, kv):
        raise HubError("the bytes that came back are not those that were stored")


def _covers(matches: tuple[Match, ...], wanted: Span) -> bool:
    at = wanted.start
    for match in matches:
        if match.span.start <= at < match.span.end:
            at = match.span.end
    return at >= wanted.end


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
    if missing := gauge.get("arena_missing_bytes"):
        size = gauge.get("arena_bytes", 0)
        yield warn(
            f"its arena has {size / 2**30:.2f} GiB: memory ran out before it had the other {missing / 2**30:.2f}",
            f"blendhub serve --arena-gib {size / 2**30:.2f}",
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
    try:
        client.register(f"blendhub-doctor-{os.getpid()}", SPACE)
    except HubError as error:
        yield warn(f"engines here cannot use it: {error}", "docker run --ipc=host ...")
    if client.arena:
        reserved, goal = client.arena.progress()
        so_far = f", {reserved / 2**30:.2f} of them reserved so far," if reserved < goal else ""
        yield ok(f"its arena of {goal / 2**30:.2f} GiB{so_far} can be mapped here")
