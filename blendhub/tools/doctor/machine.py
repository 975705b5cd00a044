"""Whether the machine has the memory that a hub needs."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from blendhub.client.arena_view import HEADER_BYTES, SHM
from blendhub.hub.memory.default_size import (
    MOST_BYTES,
    OF_AVAILABLE,
    OF_SHARED,
    available_bytes,
    group_limits,
    machine_bytes,
)
from blendhub.hub.memory.segments import mount_at
from blendhub.tools.doctor.files import as_root
from blendhub.tools.doctor.finding import Circumstances, Finding, fail, ok, warn

GIB = 2**30
FEW_BYTES = GIB
"""An arena below this holds few prompts: a token of a model with 8 billion parameters takes 128 KiB."""


def shared_memory(at: Circumstances) -> Iterator[Finding]:
    """``/dev/shm``: that it is there, that this user can use it, and that the arena fits."""
    if not SHM.is_dir():
        yield fail(
            f"{SHM} does not exist, and no arena without it", as_root(f"mkdir {SHM} && mount -t tmpfs tmpfs {SHM}")
        )
        return
    kind = mount_at(SHM).kind
    if kind != "tmpfs":
        yield fail(
            f"{SHM} is not in memory, but on {kind or 'the root file system'}, so KV would be written to a disk",
            as_root(f"mount -t tmpfs tmpfs {SHM}"),
        )
        return
    if not os.access(SHM, os.W_OK | os.X_OK):
        yield fail(f"this user cannot create files in {SHM}", as_root(f"mount -o remount,rw,mode=1777 {SHM}"))
        return
    yield _room(at)


def _room(at: Circumstances) -> Finding:
    found = os.statvfs(SHM)
    room, used = found.f_bavail * found.f_frsize, (found.f_blocks - found.f_bfree) * found.f_frsize
    wanted, by_memory = int(at.hub.arena_gib * GIB), int(min(OF_AVAILABLE * available_bytes(), MOST_BYTES))
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


def memory_limits(at: Circumstances) -> Iterator[Finding]:
    """The memory of the machine and of the control groups, held against the arena."""
    available, limits = machine_bytes(), group_limits()
    tightest = limits[0] if limits and limits[0].left < available else None
    if tightest:
        available = tightest.left
    whose = f"the control group of {tightest.file}" if tightest else "the machine"
    wanted, default = int(at.hub.arena_gib * GIB), int(OF_AVAILABLE * available)
    if wanted > available:
        yield fail(
            f"{whose} has {_gib(available)} left, less than the arena of {_gib(wanted)} that is "
            "configured: the kernel would kill the hub",
            at.to_set_arena(max(math.floor(default / GIB * 10) / 10, 0.1)),
        )
    elif tightest and not wanted and default < FEW_BYTES:
        yield warn(
            f"{whose} has {_gib(available)} left, so an arena would have {_gib(default)}, and hold few prompts",
            # The word for no limit, in either version of control groups.
            as_root(f"echo {'max' if tightest.file.name in ('memory.max', 'memory.high') else '-1'} > {tightest.file}"),
        )
    else:
        yield ok(f"{whose} has {_gib(available)} left")


def _remount(n_bytes: int) -> str:
    return as_root(f"mount -o remount,size={math.ceil(n_bytes / 2**20)}M {SHM}")


def _gib(n_bytes: float) -> str:
    return f"{n_bytes / GIB:.2f} GiB"


KERNEL = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
"""The value in brackets is in force. Over the mount option, only ``deny`` and ``force`` win."""

HUGE = {"huge=always", "huge=within_size", "huge=advise"}


def huge_pages(at: Circumstances) -> Iterator[Finding]:
    try:
        in_force = KERNEL.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    except OSError:
        yield ok("this kernel has no huge pages for shared memory")
        return
    given = HUGE.intersection(mount_at(SHM).options)
    if in_force == "deny":
        yield warn(
            "the kernel denies huge pages to shared memory: copies are a fifth slower",
            as_root(f"echo never > {KERNEL}"),
        )
    elif in_force == "force" or given:
        yield ok(f"{SHM} gives the arena huge pages ({', '.join(given) or 'the kernel forces them'})")
    else:
        yield warn(
            f"{SHM} gives the arena no huge pages: copies are a fifth slower",
            as_root(f"mount -o remount,huge=advise {SHM}"),
        )
