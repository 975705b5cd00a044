"""Whether this machine has the memory that a hub needs, and how a running hub does."""

import math
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from blendhub.cli.checks.subject import Finding, Subject, fail, hubs_of, ok, warn
from blendhub.client.arena_view import HEADER_BYTES, SHM
from blendhub.client.hub_client import HubClient
from blendhub.client.wire import HubStats
from blendhub.core.errors import BlendHubError, DeadlineExceeded, PeerGone, VersionMismatch
from blendhub.core.layout import KVLayout, Namespace
from blendhub.hub.config import Listen
from blendhub.hub.memory.default_size import OF_AVAILABLE, OF_SHARED, available_bytes, default_arena_bytes
from blendhub.hub.memory.segments import mount_at

GIB = 2**30
FEW_BYTES = GIB
"""An arena below this holds few prompts: a token of a model with 8 billion parameters takes 128 KiB."""

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
"""The value in brackets is in force, and ``force`` wins over the mount option."""


def shared_memory(subject: Subject) -> Iterator[Finding]:
    """``/dev/shm``: that it is there, that this user can use it, and that the arena fits there and in memory."""
    mount = mount_at(SHM)
    if not SHM.is_dir():
        mend = _as_root(f"mkdir {SHM} && mount -t tmpfs tmpfs {SHM}")
        yield fail(f"{SHM} does not exist, and no arena without it", mend)
    elif mount.kind != "tmpfs":
        where = f"is not in memory, but on {mount.kind or 'the root file system'}"
        yield fail(f"{SHM} {where}, so KV would be written to a disk", _as_root(f"mount -t tmpfs tmpfs {SHM}"))
    elif not os.access(SHM, os.W_OK | os.X_OK):
        yield fail(f"this user cannot create files in {SHM}", _as_root(f"mount -o remount,rw,mode=1777 {SHM}"))
    else:
        yield _room(int(subject.hub.arena_gib * GIB))
        in_force = HUGE_PAGES.read_text(encoding="ascii") if HUGE_PAGES.exists() else "[force]"
        if "[force]" not in in_force and not {"huge=always", "huge=within_size", "huge=advise"} & {*mount.options}:
            mend = _as_root(f"mount -o remount,huge=advise {SHM}")
            yield warn(f"{SHM} gives the arena no huge pages: copies are a fifth slower", mend)


def _room(arena: int) -> Finding:
    """``arena``: the configured size in bytes; 0: the hub chooses it."""
    shm, available = os.statvfs(SHM), available_bytes()
    room, used = shm.f_bavail * shm.f_frsize, (shm.f_blocks - shm.f_bfree) * shm.f_frsize
    if arena > available:
        return fail(
            f"this machine, or its control group, has {_gib(available)} of memory left, less than the arena of "
            f"{_gib(arena)} that is configured: the kernel would kill the hub; lower hub.arena_gib"
        )
    if arena + HEADER_BYTES > room:
        sentence = f"{SHM} has {_gib(room)} free, less than the configured arena of {_gib(arena)}"
        return fail(sentence, _enlarge(used + arena + HEADER_BYTES))
    chosen = arena or default_arena_bytes()
    if not arena and chosen < FEW_BYTES <= OF_AVAILABLE * available:
        return warn(
            f"{SHM} has {_gib(room)} free, so an arena would have {_gib(chosen)} only (in a container, its --shm-size "
            "says how much)",
            _enlarge(used + math.ceil(OF_AVAILABLE * available / OF_SHARED)),
        )
    return ok(f"{SHM} has {_gib(room)} free for an arena of {_gib(chosen)}")


def _as_root(command: str) -> str:
    return command if os.geteuid() == 0 else f"sudo sh -c {shlex.quote(command)}"


def _enlarge(n_bytes: int) -> str:
    return _as_root(f"mount -o remount,size={math.ceil(n_bytes / 2**20)}M {SHM}")


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:.2f} GiB"


TIMEOUT_S = 5.0
LAYOUT = KVLayout(layers=4, kv_heads=4, key_dim=64, value_dim=64, dtype="float16")
FEW_LOOKUPS = 100
"""The number of lookups below which their share of hits means nothing."""


def hub(subject: Subject) -> Iterator[Finding]:
    """A running hub: that it answers, what its numbers say, and that this machine can map its arena."""
    listening = hubs_of(subject)
    if not listening:
        yield ok("no hub is named, and none runs at the default endpoint: an engine embeds one")
    for listen in listening:
        yield from _hub_at(listen, subject)


def _hub_at(listen: Listen, subject: Subject) -> Iterator[Finding]:
    endpoint = listen.endpoint
    # The engine that is checked, when it starts.
    engine_opens = not subject.settings.endpoint and listen in subject.settings.hub.listen
    try:
        with HubClient(endpoint, listen.transport, listen.options, host=subject.host, timeout=TIMEOUT_S) as client:
            yield from _trouble_in(client.stats().result())
            client.register(f"blendhub-check-{os.getpid()}", Namespace(model="blendhub check", layout=LAYOUT))
            assert client.arena  # registering maps it, or raises
            reserved, goal = client.arena.progress()
            so_far = f", {_gib(reserved)} of them reserved so far," if reserved < goal else ""
            yield ok(f"the hub at {endpoint} answers, and its arena of {_gib(goal)}{so_far} can be mapped here")
            if engine_opens:
                yield warn(
                    f"{endpoint} is in hub.listen, so if that hub is not of this engine itself, vLLM's start ends: to "
                    "share it, name it as the endpoint, and leave hub out"
                )
    except VersionMismatch as error:
        yield fail(f"the hub at {endpoint} speaks another version: {error}", "pip install --upgrade blendhub")
    except (PeerGone, DeadlineExceeded) as error:
        if engine_opens:
            yield ok(f"no hub runs at {endpoint} yet: the engine embeds one, which listens there")
        else:
            is_in_file = subject.hub_file and listen in subject.hub.listen
            flag, value = ("config", subject.hub_file) if is_in_file else ("endpoint", endpoint)
            yield fail(f"no hub answers at {endpoint}: {error}", f"blendhub serve --{flag} {shlex.quote(value)}")
    except BlendHubError as error:
        yield fail(f"the hub at {endpoint} cannot be used: {error}")


def _trouble_in(stats: HubStats) -> Iterator[Finding]:
    """What an operator should know of a hub's numbers."""
    count, gauge = stats.counters, stats.gauges
    arena = gauge.get("arena_bytes", 0)
    if failures := count.get("store_failures"):
        yield warn(f"its store failed {failures:,.0f} times; its log has the reasons", "df -h")
    if missing := gauge.get("arena_missing_bytes"):
        sentence = f"its arena has {_gib(arena)}: memory ran out before it had the other {_gib(missing)}"
        yield warn(sentence, f"blendhub serve --arena-gib {arena / GIB:.2f}")
    if forgotten := count.get("forgotten_chunks"):
        yield warn(
            f"{forgotten:,.0f} chunks were evicted that no store had: its arena of {_gib(arena)} is too small for what "
            "is asked for",
            f"blendhub serve --arena-gib {max(1, round(2 * arena / GIB))} --store DIR",
        )
    if (lookups := count.get("requests_lookup", 0)) >= FEW_LOOKUPS and not count.get("lookups_that_found", 0):
        yield warn(f"none of {lookups:,.0f} lookups found anything", "blendhub explain --help")
