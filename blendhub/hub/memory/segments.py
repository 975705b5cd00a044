"""Segments in /dev/shm: makes them, knows those of this user's hubs, and removes those of hubs that were killed."""

import contextlib
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from blendhub.client.arena_view import SHM, read_progress
from blendhub.system.safe_open import NotOurs, open_own

log = logging.getLogger(__name__)
_SEGMENT_NAME = re.compile(r"blendhub-\d+-[0-9a-f]{16}")


def new_segment() -> tuple[Path, int]:
    """Create an empty segment and lock it; returns its path and descriptor."""
    while True:
        path = SHM / f"blendhub-{os.getuid()}-{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return path, fd
        # Another hub that looked for leftovers took the lock first, and removes the segment.
        os.close(fd)


def remove_leftovers() -> list[str]:
    """Remove this user's segments whose hubs were killed; returns their names."""
    removed = []
    for path in leftovers():
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append(path.name)
    if removed:
        log.warning("removed the shared memory of killed hubs from %s: %s", SHM, ", ".join(removed))
    return removed


def leftovers(least_age_s: float = 0.0) -> Iterator[Path]:
    """This user's segments whose hubs were killed. Each is locked until the next one is asked for.

    A hub holds a lock on its segment. The kernel releases it when the hub's process ends for any reason, also in
    another container. A hub that has just created its segment may not hold it yet, and then leaves the segment to the
    one who does: who does not remove what is found names a least age.
    """
    for path, fd in _segments():
        if time.time() - os.fstat(fd).st_ctime < least_age_s:
            continue
        with contextlib.suppress(OSError):  # its hub runs
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path


def unreserved_bytes() -> int:
    """The memory that this user's hubs are still going to reserve."""
    left = 0
    for _, fd in _segments():
        with contextlib.suppress(OSError, ValueError):
            left += read_progress(fd).left
    return left


def _segments() -> Iterator[tuple[Path, int]]:
    """This user's segments, each open until the next one is asked for."""
    for path in SHM.glob(f"blendhub-{os.getuid()}-*"):
        if not _SEGMENT_NAME.fullmatch(path.name):
            continue
        try:
            fd = open_own(path, os.O_RDWR)
        except NotOurs as error:
            log.warning("skipped %s, which is named like an arena: %s", path, error)
            continue
        except OSError:  # already removed
            continue
        try:
            yield path, fd
        finally:
            os.close(fd)


class Mount(NamedTuple):
    """A mounted file system."""

    kind: str
    options: tuple[str, ...]


def mount_at(place: Path) -> Mount:
    """The file system that is mounted at a directory; without type and options if the directory is no mount point."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    # If several are mounted on one another, the last one is visible.
    return next(
        (Mount(fields[2], tuple(fields[3].split(","))) for fields in reversed(mounts) if fields[1] == str(place)),
        Mount("", ()),
    )


def free_shared_bytes() -> int:
    """Free memory of the file system at /dev/shm."""
    shared = os.statvfs(SHM)
    return shared.f_bavail * shared.f_frsize
