"""A hub in a child process that is tested, and a running hub that is asked."""

import http.client
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from blendhub.client.arena_view import SHM
from blendhub.client.hub_client import HubClient, Reservation
from blendhub.client.wire import HubStats
from blendhub.core.errors import BlendHubError, DeadlineExceeded, HubError, PeerGone, PluginError, VersionMismatch
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.spans import Match, Span
from blendhub.core.tokens import Tokens
from blendhub.hub.config import HubConfig
from blendhub.hub.embedded import EmbeddedHub, embedded_hub
from blendhub.tools.doctor.files import as_root, quoted
from blendhub.tools.doctor.finding import Circumstances, Finding, fail, ok, warn

Chunks: TypeAlias = npt.NDArray[np.uint8]
LAYOUT = KVLayout(layers=16, kv_heads=4, key_dim=64, value_dim=64, dtype="float16")
SPACE = Namespace(model="blendhub doctor", layout=LAYOUT)
LEAST_CHUNKS, MOST_CHUNKS = 2, 16
SPARE = 1.5
"""How much larger than what is stored the arena is."""

TIMEOUT_S = 5.0
SLOW = 0.5
"""An arena this much slower than other memory is reported."""

ROUNDS = 3


def self_test(at: Circumstances) -> Iterator[Finding]:
    room = os.statvfs(SHM)
    needed = int(SPARE * SPACE.slot_bytes)
    n_chunks = min(MOST_CHUNKS, int(0.9 * room.f_bavail * room.f_frsize) // needed)
    if n_chunks < LEAST_CHUNKS:
        yield fail(
            f"{SHM} has no room for an arena of {LEAST_CHUNKS * needed / 2**20:.0f} MiB, with which to test a hub",
            as_root(f"mount -o remount,size={2 * MOST_CHUNKS * needed // 2**20}M {SHM}"),
        )
        return
    no_loopback = list(_loopback())
    yield from no_loopback
    config = HubConfig(arena_gib=n_chunks * needed / 2**30, metrics="" if no_loopback else "127.0.0.1:0")
    try:
        with embedded_hub(config, "process", at.host) as hub, hub.connect() as client:
            yield from _with(hub, client, n_chunks)
    except PluginError as error:
        yield fail(f"no hub can be started here: {error}", "pip install --upgrade 'blendhub[cpu]'")
    except BlendHubError as error:
        yield fail(f"no hub works here: {error}", "pip install --force-reinstall blendhub blendhub-transports")


def _loopback() -> Iterator[Finding]:
    """Metrics are served on loopback, and so are hubs on TCP without keys."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=TIMEOUT_S).close()
    except OSError as error:
        yield fail(f"the loopback interface does not work: {error}", as_root("ip link set lo up"))


def _with(hub: EmbeddedHub, client: HubClient, n_chunks: int) -> Iterator[Finding]:
    tokens = np.arange(n_chunks * LAYOUT.chunk_tokens, dtype=np.uint32)
    random = np.random.default_rng()
    kv = random.integers(0, 255, (n_chunks, LAYOUT.shard_bytes), np.uint8)
    started = time.perf_counter()
    client.register("blendhub-doctor", SPACE, rank=0)
    if client.arena is None:
        raise HubError(client.arena_trouble)
    reserved = client.reserve(tokens, Span(0, len(tokens)))
    writing = _stored(client, reserved, kv)
    # Once where it was, and once behind other text.
    other = np.arange(10**6, 10**6 + 100, dtype=np.uint32)
    reading = _found(client, tokens, 0, kv)
    _found(client, np.concatenate([other, tokens]), len(other), kv)
    took = time.perf_counter() - started
    yield ok(f"a hub stored {len(tokens):,} tokens and gave them back, moved too, within {took:.1f} s")
    if hub.metrics_address:
        yield from _metrics(hub.metrics_address)
    yield judged(writing, reading, _copied(kv))


def _stored(client: HubClient, reserved: Reservation, kv: Chunks) -> float:
    """Write the chunks, and commit them; returns the bytes a second."""
    if reserved.right is None or len(reserved.slots) != len(kv):
        raise HubError(f"the hub gave {len(reserved.slots)} slots for {len(kv)} chunks")
    shards = [client.shard(slot.slot) for slot in reserved.slots]

    def write() -> None:
        for shard, chunk in zip(shards, kv, strict=True):
            shard[:] = chunk

    with client.writing(reserved.right):
        speed = _speed(write, kv.nbytes)
    client.commit(reserved.right, reserved.span.end)
    return speed


def _found(client: HubClient, prompt: Tokens, start: int, kv: Chunks) -> float:
    """Look the chunks up, and read them; returns the bytes a second. Raises HubError unless all are as written."""
    found = client.lookup(prompt)
    wanted = Span(start, start + kv.shape[0] * LAYOUT.chunk_tokens)
    if not _covers(found.matches, wanted):
        raise HubError(f"stored tokens {wanted} were not found; found {found.matches}")
    read = np.empty_like(kv)
    with client.reading(found) as pieces:
        slots = list(dict.fromkeys(piece.shard for piece in pieces))
        if len(slots) != len(kv):
            raise HubError(f"the hub gave {len(slots)} slots to read for {len(kv)} chunks")

        def copy() -> None:
            for chunk, slot in zip(read, slots, strict=True):
                chunk[:] = client.shard(slot)

        speed = _speed(copy, kv.nbytes)
    if not np.array_equal(read, kv):
        raise HubError("the bytes that came back are not those that were stored")
    return speed


def _covers(matches: tuple[Match, ...], wanted: Span) -> bool:
    at = wanted.start
    for match in matches:
        if match.span.start <= at < match.span.end:
            at = match.span.end
    return at >= wanted.end


def _copied(kv: Chunks) -> float:
    """The speed of a copy between two pieces of this process's own memory, to compare with the arena's."""
    target = np.empty_like(kv)

    def copy() -> None:
        for there, here in zip(target, kv, strict=True):
            there[:] = here

    return _speed(copy, kv.nbytes)


def _speed(copy: Callable[[], None], n_bytes: int) -> float:
    copy()  # maps the pages
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        copy()
        best = min(best, time.perf_counter() - started)
    return n_bytes / best


def judged(writing: float, reading: float, private: float) -> Finding:
    """The speed of the arena, in bytes a second, held against that of other memory."""
    sentence = (
        f"one core writes it at {writing / 2**30:.1f} GiB/s and reads it at {reading / 2**30:.1f}, and copies other "
        f"memory at {private / 2**30:.1f}"
    )
    if min(writing, reading) >= SLOW * private:
        return ok(sentence)
    return warn(f"the arena is slow: {sentence}", as_root(f"mount -o remount,huge=advise {SHM}"))


def _metrics(address: str) -> Iterator[Finding]:
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        answer = connection.getresponse().read()
    except OSError as error:
        answer = str(error).encode()
    finally:
        connection.close()
    if answer != b"ok\n":
        yield fail(f"{address} is the hub's, but answers {answer[:50]!r}", as_root("iptables --table nat --list"))


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
