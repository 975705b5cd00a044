"""The shared memory that holds KV. The hub creates and removes it; the processes that read and write KV map it."""

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
import time
from collections.abc import Generator, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NamedTuple

from blendhub.client.arena_view import HEADER_BYTES, SHM, ArenaName, header_of
from blendhub.core.errors import HubError
from blendhub.hub.memory.extents import GRAIN, Extents
from blendhub.system.file_locks import is_byte_locked
from blendhub.system.safe_open import NotOurs, open_own

log = logging.getLogger(__name__)
STEP = 2**27
"""Bytes reserved at a time, which takes about a tenth of a second."""

MADV_POPULATE_WRITE = 23

_SEGMENT_NAME = re.compile(r"blendhub-\d+-[0-9a-f]{16}")


class Arena:
    """A segment of POSIX shared memory, all of it reserved at creation, so that no later access can fail."""

    def __init__(self, size: int) -> None:
        for _ in self._create_in_steps(size):
            pass

    @classmethod
    async def create(cls, size: int) -> "Arena":
        """Create an arena without blocking the event loop: many GiB take many seconds."""
        arena = cls.__new__(cls)
        # Closed explicitly, so that a cancelled creation removes its segment at once.
        with contextlib.closing(arena._create_in_steps(size)) as steps:
            for _ in steps:
                await asyncio.sleep(0)
        return arena

    def _create_in_steps(self, size: int) -> Generator[None]:
        """Reserve ``STEP`` bytes between two yields; closing the generator early removes the segment."""
        remove_leftovers()
        size = size // GRAIN * GRAIN
        _check_free_memory(size)
        self.extents = Extents(size)
        self._path, self._fd = _new_segment()
        self.name = ArenaName(self._path.name, secrets.token_hex(16), size)
        try:
            os.ftruncate(self._fd, HEADER_BYTES + size)
            self._memory = mmap.mmap(self._fd, HEADER_BYTES + size)
            # Before anything touches the memory: pages keep the size that they are created with.
            self._memory.madvise(mmap.MADV_HUGEPAGE)
            # The file system gives huge pages only to memory that is touched with the advice to have them.
            reserve = self._touch if "huge=advise" in mount_at(SHM).options else self._allocate
            for at in range(0, HEADER_BYTES + size, STEP):
                reserve(at, min(STEP, HEADER_BYTES + size - at))
                yield
            os.pwrite(self._fd, header_of(self.name), 0)
        except BaseException as error:
            self._path.unlink()
            os.close(self._fd)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise _too_small(size) from error
            raise
        # A parent may kill this process before it can clean up, as vLLM does; Python's resource tracker then removes
        # the segment.
        self._tracked = multiprocessing.parent_process() is not None
        if self._tracked:
            resource_tracker.register(f"/{self.name.segment}", "shared_memory")

    def _allocate(self, at: int, size: int) -> None:
        """Reserve memory with pages of the size that the file system gives without advice."""
        os.posix_fallocate(self._fd, at, size)

    def _touch(self, at: int, size: int) -> None:
        """Reserve memory with huge pages: the file system follows the mapping's advice only where it is touched."""
        try:
            self._memory.madvise(MADV_POPULATE_WRITE, at, size)
            # The pages stay in the file. This process does not need them in its page tables.
            self._memory.madvise(mmap.MADV_DONTNEED, at, size)
        except OSError as error:
            if error.errno == errno.EINVAL:  # Linux before 5.14
                self._allocate(at, size)
            elif error.errno == errno.EFAULT:  # an access would fail with SIGBUS
                raise OSError(errno.ENOSPC, "no memory is left") from error
            else:
                raise

    def slot(self, offset: int, size: int) -> memoryview:
        """The bytes of a slot."""
        return memoryview(self._memory)[HEADER_BYTES + offset : HEADER_BYTES + offset + size]

    def is_mapped_by(self, mapping: int) -> bool:
        """Whether a process still has a client's mapping: the one that created it, or one forked from that process."""
        return is_byte_locked(self._fd, mapping)

    def close(self) -> None:
        """Remove the segment; processes that map it keep its bytes. Closing twice is fine."""
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
            log.debug("the arena %s still has views; its memory is freed with the last of them", self.name.segment)


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
            if time.time() - os.fstat(fd).st_ctime >= least_age_s:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path
        except OSError:  # its hub runs
            continue
        finally:
            os.close(fd)


class Mount(NamedTuple):
    """A mounted file system."""

    kind: str
    options: tuple[str, ...]


def mount_at(place: Path) -> Mount:
    """The file system that is mounted at a directory; without type and options if the directory is no mount point."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    # Of file systems that are mounted on one another, the last is visible.
    return next(
        (Mount(fields[2], tuple(fields[3].split(","))) for fields in reversed(mounts) if fields[1] == str(place)),
        Mount("", ()),
    )


def _new_segment() -> tuple[Path, int]:
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


def _check_free_memory(size: int) -> None:
    if size + HEADER_BYTES > _free_memory():
        raise _too_small(size)


def _free_memory() -> int:
    shared = os.statvfs(SHM)
    return shared.f_bavail * shared.f_frsize


def _too_small(size: int) -> HubError:
    free = _free_memory()
    return HubError(
        f"{SHM} has {free / 2**20:.0f} MiB free, and the arena needs {(size + HEADER_BYTES) / 2**20:.0f} MiB; "
        f"make it larger (mount -o remount,size=..., or --shm-size of the container) or set arena_gib to at most "
        f"{max(free - HEADER_BYTES, 0) / 2**30:.2f}"
    )
