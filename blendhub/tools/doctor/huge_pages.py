"""Whether the arena can have huge pages."""

from collections.abc import Iterator
from pathlib import Path

from blendhub.client.arena_view import SHM
from blendhub.hub.memory.arena import mount_at
from blendhub.tools.doctor.access import as_root
from blendhub.tools.doctor.circumstances import Circumstances
from blendhub.tools.doctor.finding import Finding, ok, warn

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
