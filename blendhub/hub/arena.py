"""The shared memory that holds KV: made, sized and removed by the hub, mapped by whoever reads and writes it."""

import asyncio
import contextlib
import errno
import fcntl
import logging
import mmap
import multiprocessing
import os
import re
import secrets
from collections.abc import Generator
from multiprocessing import resource_tracker
from pathlib import Path

from blendhub.arena_view import HEADER_BYTES, SHM, ArenaName, header_of
from blendhub.errors import HubError
from blendhub.file_locks import is_byte_locked
from blendhub.hub.extents import GRAIN, Extents

log = logging.getLogger(__name__)
STEP = 2**27
"""How much memory is reserved at a time: a tenth of a second or so."""

_OURS = re.compile(r"blendhub-\d+-[0-9a-f]{16}")


class Arena:
    """A segment of POSIX shared memory; its memory is reserved at once, so that no access can fail later."""

    def __init__(self, size: int) -> None:
        for _ in self._made(size):
            pass

    @classmethod
    async def made(cls, size: int) -> "Arena":
        """The same on an event loop, which turns meanwhile: many GiB take many seconds."""
        arena = cls.__new__(cls)
        # Closed here, and not when the collector finds it: who is cancelled leaves nothing behind.
        with contextlib.closing(arena._made(size)) as steps:
            for _ in steps:
                await asyncio.sleep(0)
        return arena

    def _made(self, size: int) -> Generator[None]:
        """Step by step; who gives up in between leaves nothing behind."""
        remove_leftovers()
        size = size // GRAIN * GRAIN
        _check_room(size)
        self.extents = Extents(size)
        self._path, self._fd = _new_segment()
        self.name = ArenaName(self._path.name, secrets.token_hex(16), size)
        try:
            os.pwrite(self._fd, header_of(self.name), 0)
            for at in range(0, HEADER_BYTES + size, STEP):
                os.posix_fallocate(self._fd, at, min(STEP, HEADER_BYTES + size - at))
                yield
            self._memory = mmap.mmap(self._fd, HEADER_BYTES + size)
        except BaseException as error:
            self._path.unlink()
            os.close(self._fd)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise _too_small(size) from error
            raise
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        # A parent may kill this process before it can clean up, as vLLM does; the tracker of the family outlives it.
        self._tracked = multiprocessing.parent_process() is not None
        if self._tracked:
            resource_tracker.register(f"/{self.name.segment}", "shared_memory")

    def slot(self, offset: int, size: int) -> memoryview:
        """The bytes of a slot."""
        return memoryview(self._memory)[HEADER_BYTES + offset : HEADER_BYTES + offset + size]

    def is_mapped_by(self, mapping: int) -> bool:
        """Whether a client's mapping lasts, in the process that made it or in one forked from that."""
        return is_byte_locked(self._fd, mapping)

    def close(self) -> None:
        """Remove the segment; a process that maps it keeps its bytes. Closing twice is fine."""
        if self._fd < 0:
            return
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1
        if self._tracked:
            self._tracked = False
            resource_tracker.unregister(f"/{self.name.segment}", "shared_memory")
        try:
            self._memory.close()
        except BufferError:
            log.debug("the arena %s is still viewed; its memory goes with the last view", self.name.segment)


def remove_leftovers() -> list[str]:
    """Remove the segments of this user whose hubs were killed; returns their names.

    A hub holds a lock on its segment until it ends, however it ends and in whichever container it runs.
    """
    removed = []
    for path in SHM.glob(f"blendhub-{os.getuid()}-*"):
        if not _OURS.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):  # it has just been removed, or its hub lives
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path.name)
            finally:
                os.close(fd)
    if removed:
        log.warning("removed what killed hubs left in %s: %s", SHM, ", ".join(removed))
    return removed


def _new_segment() -> tuple[Path, int]:
    """An empty segment that this process holds locked, as path and descriptor."""
    while True:
        path = SHM / f"blendhub-{os.getuid()}-{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return path, fd
        # Another hub that looked for leftovers was quicker than the lock, and removes the segment.
        os.close(fd)


def _check_room(size: int) -> None:
    room = os.statvfs(SHM)
    if size + HEADER_BYTES > room.f_bavail * room.f_frsize:
        raise _too_small(size)


def _too_small(size: int) -> HubError:
    room = os.statvfs(SHM)
    free = room.f_bavail * room.f_frsize
    return HubError(
        f"{SHM} has {free / 2**20:.0f} MiB free, and the arena needs {(size + HEADER_BYTES) / 2**20:.0f} MiB; "
        f"make it larger (mount -o remount,size=..., or --shm-size of the container) or set arena_gib to at most "
        f"{max(free - HEADER_BYTES, 0) / 2**30:.2f}"
    )
