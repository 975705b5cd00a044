"""Whether this machine has the memory that a hub needs, and how a running hub does."""

import math
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from blendhub.cli.checks.finding import Finding, Subject, fail, ok, warn
from blendhub.client.arena_view import HEADER_BYTES, SHM
from blendhub.client.hub_client import HubClient
from blendhub.client.wire import HubStats
from blendhub.core.errors import BlendHubError, DeadlineExceeded, PeerGone, VersionMismatch
from blendhub.core.layout import KVLayout, Namespace
from blendhub.hub.memory.default_size import MOST_BYTES, OF_AVAILABLE, OF_SHARED, available_bytes
from blendhub.hub.memory.segments import mount_at

GIB = 2**30
FEW_BYTES = GIB
"""An arena below this holds few prompts: a token of a model with 8 billion parameters takes 128 KiB."""

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
"""The value in brackets is in force. Over the mount option, only ``deny`` and ``force`` win."""


def shared_memory(subject: Subject) -> Iterator[Finding]:
    """``/dev/shm``: that it is there, that this user can use it, and that the arena fits there and in memory."""
    if not SHM.is_dir():
        yield fail(
            f"{SHM} does not exist, and no arena without it", as_root(f"mkdir {SHM} && mount -t tmpfs tmpfs {SHM}")
        )
        return
    mount = mount_at(SHM)
    if mount.kind != "tmpfs":
        yield fail(
            f"{SHM} is not in memory, but on {mount.kind or 'the root file system'}, so KV would be written to a disk",
            as_root(f"mount -t tmpfs tmpfs {SHM}"),
        )
        return
    if not os.access(SHM, os.W_OK | os.X_OK):
        yield fail(f"this user cannot create files in {SHM}", as_root(f"mount -o remount,rw,mode=1777 {SHM}"))
        return
    yield _room(subject)
    in_force = HUGE_PAGES.read_text(encoding="ascii") if HUGE_PAGES.exists() else "[force]"
    if "[force]" not in in_force and not {"huge=always", "huge=within_size", "huge=advise"} & {*mount.options}:
        denied = "[deny]" in in_force
        yield warn(
            f"{'the kernel' if denied else SHM} gives the arena no huge pages: copies are a fifth slower",
            as_root(f"echo never > {HUGE_PAGES}" if denied else f"mount -o remount,huge=advise {SHM}"),
        )


def _room(subject: Subject) -> Finding:
    shm, available = os.statvfs(SHM), available_bytes()
    room, used = shm.f_bavail * shm.f_frsize, (shm.f_blocks - shm.f_bfree) * shm.f_frsize
    wanted, by_memory = int(subject.hub.arena_gib * GIB), int(min(OF_AVAILABLE * available, MOST_BYTES))
    if wanted > available:
        return fail(
            f"this machine, or its control group, has {_gib(available)} of memory left, less than the arena of "
            f"{_gib(wanted)} that is configured: the kernel would kill the hub; lower hub.arena_gib"
        )
    if wanted:
        if wanted + HEADER_BYTES > room:
            return fail(
                f"{SHM} has {_gib(room)} free, less than the configured arena of {_gib(wanted)}",
                _remount(used + wanted + HEADER_BYTES),
            )
        return ok(f"{SHM} has {_gib(room)} free for an arena of {_gib(wanted)}")
    by_room = int(OF_SHARED * room)
    if by_room < min(by_memory, FEW_BYTES) or by_room < by_memory / 2:
        return warn(
            f"{SHM} has {_gib(room)} free, so an arena would have {_gib(by_room)}, where memory allows "
            f"{_gib(by_memory)} (in a container, its --shm-size says how much)",
            _remount(used + math.ceil(by_memory / OF_SHARED)),
        )
    return ok(f"{SHM} has {_gib(room)} free; an arena would have {_gib(min(by_room, by_memory))}")


def as_root(command: str) -> str:
    return command if os.geteuid() == 0 else f"sudo sh -c {shlex.quote(command)}"


def _remount(n_bytes: int) -> str:
    return as_root(f"mount -o remount,size={math.ceil(n_bytes / 2**20)}M {SHM}")


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:.2f} GiB"


TIMEOUT_S = 5.0
SLOW_S = 0.05
"""An answer this late costs a request more than the lookup saves of a short prompt."""

SAMPLES = 20
FEW = 100
"""The number of lookups below which their share of hits means nothing."""

LAYOUT = KVLayout(layers=4, kv_heads=4, key_dim=64, value_dim=64, dtype="float16")


def hub(subject: Subject) -> Iterator[Finding]:
    """A running hub: that it answers, what its numbers say, and that this machine can map its arena."""
    endpoint = subject.hub_endpoint
    if not endpoint:
        yield ok("no hub is named, and none runs at the default endpoint: an engine embeds one")
        return
    transport = subject.transport
    try:
        with HubClient(endpoint, transport.name, transport.options, host=subject.host, timeout=TIMEOUT_S) as client:
            yield _answers(client, endpoint)
            yield from trouble_in(client.stats())
            yield _maps(client)
    except VersionMismatch as error:
        yield fail(f"the hub at {endpoint} speaks another version: {error}", "pip install --upgrade blendhub")
    except (PeerGone, DeadlineExceeded) as error:
        yield fail(f"no hub answers at {endpoint}: {error}", f"blendhub serve --endpoint {shlex.quote(endpoint)}")
    except BlendHubError as error:
        yield fail(f"the hub at {endpoint} cannot be used: {error}")


def _answers(client: HubClient, endpoint: str) -> Finding:
    times = []
    for _ in range(SAMPLES):
        started = time.perf_counter()
        client.stats()
        times.append(time.perf_counter() - started)
    seconds = sorted(times)[SAMPLES // 2]
    answered = f"the hub at {endpoint} answers within {seconds * 1e3:.1f} ms"
    return warn(f"{answered}, which is late", "top -bn1 | head -20") if seconds > SLOW_S else ok(answered)


def trouble_in(stats: HubStats) -> Iterator[Finding]:
    """What an operator should know of a hub's numbers."""
    count, gauge = stats.counters, stats.gauges
    arena_gib = gauge.get("arena_bytes", 0) / GIB
    if failures := count.get("store_failures"):
        yield warn(f"its store failed {failures:,.0f} times; its log has the reasons", "df -h")
    if corrupted := count.get("store_corrupted"):
        yield warn(f"{corrupted:,.0f} entries of its store were damaged, and dropped", "smartctl --all /dev/sda")
    if missing := gauge.get("arena_missing_bytes"):
        yield warn(
            f"its arena has {arena_gib:.2f} GiB: memory ran out before it had the other {missing / GIB:.2f}",
            f"blendhub serve --arena-gib {arena_gib:.2f}",
        )
    if forgotten := count.get("forgotten_chunks"):
        yield warn(
            f"{forgotten:,.0f} chunks were evicted that no store had: its arena of {arena_gib:.2f} GiB is too small "
            "for what is asked for",
            f"blendhub serve --arena-gib {max(1, round(2 * arena_gib))} --store DIR",
        )
    if (lookups := count.get("requests_lookup", 0)) >= FEW and not count.get("lookups_that_found", 0):
        yield warn(f"none of {lookups:,.0f} lookups found anything", "blendhub explain --help")


def _maps(client: HubClient) -> Finding:
    client.register(f"blendhub-check-{os.getpid()}", Namespace(model="blendhub check", layout=LAYOUT))
    assert client.arena  # registering maps it, or raises
    reserved, goal = client.arena.progress()
    so_far = f", {reserved / GIB:.2f} of them reserved so far," if reserved < goal else ""
    return ok(f"its arena of {goal / GIB:.2f} GiB{so_far} can be mapped here")
