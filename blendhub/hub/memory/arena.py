"""The shared memory that holds KV. The hub creates and removes it; the processes that read and write KV map it."""

import asyncio
import errno
import logging
import mmap
import multiprocessing
import os
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import resource_tracker

import numpy as np

from blendhub.client.arena_view import HEADER_BYTES, PROGRESS_AT, SHM, SHM_ADVICE, ArenaName, header_of
from blendhub.contracts import ArenaProgress
from blendhub.core.errors import HubError
from blendhub.hub.memory.default_size import available_bytes
from blendhub.hub.memory.extents import GRAIN, Extents
from blendhub.hub.memory.segments import free_shared_bytes, mount_at, new_segment, remove_leftovers
from blendhub.system.file_locks import is_byte_locked
from blendhub.system.memory import MADV_POPULATE_WRITE, MADV_REMOVE, interleave, madvise, memory_nodes
from blendhub.system.processes import let_others_run_first

log = logging.getLogger(__name__)
STEP = 2**25
"""Bytes reserved at a time, which takes some hundredths of a second. The end of a hub waits for one step."""

NICENESS = 10
"""The niceness of the thread that reserves: where cores are scarce, an engine's first steps would be late."""

SPARE_BYTES = 2**28
"""Memory that a step leaves free: with less, the kernel may kill a process instead of refusing the step."""


class Arena:
    """A segment of POSIX shared memory that is reserved in steps. No access to what is reserved can fail.

    The first step is reserved at the creation, the others by ``reserve``. Slots exist as far as memory is reserved.
    """

    def __init__(self, size: int) -> None:
        remove_leftovers()
        size = size // GRAIN * GRAIN
        if size + HEADER_BYTES > free_shared_bytes():
            raise _too_small(size)
        self.extents = Extents(size)
        self._path, self._fd = new_segment()
        self._in_step = threading.Lock()
        """Held while a step is reserved, so that ``close`` waits for it."""
        self.name = ArenaName(self._path.name, secrets.token_hex(16), size)
        self._file_bytes = HEADER_BYTES + size
        try:
            os.ftruncate(self._fd, self._file_bytes)
            self._memory = mmap.mmap(self._fd, self._file_bytes)
            self._address = np.frombuffer(self._memory, np.uint8).ctypes.data
            # Before anything touches the memory: pages keep the size that they are created with.
            self._memory.madvise(mmap.MADV_HUGEPAGE)
            self._interleave()
            # The file system gives huge pages only to memory that is touched with the advice to have them.
            self._reserve_range = self._touch if "huge=advise" in mount_at(SHM).options else self._allocate
            self._reserved_bytes = min(STEP, self._file_bytes)
            self._reserve_range(0, self._reserved_bytes)
            os.pwrite(self._fd, header_of(self.name), 0)
        except BaseException as error:
            self._path.unlink()
            os.close(self._fd)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise _too_small(size) from error
            raise
        self._goal = size
        self._grow()
        # A parent may kill this process before it can clean up, as vLLM does; Python's resource tracker then removes
        # the segment.
        self._tracked = multiprocessing.parent_process() is not None
        if self._tracked:
            resource_tracker.register(f"/{self.name.segment}", "shared_memory")

    @property
    def progress(self) -> ArenaProgress:
        return ArenaProgress(self.extents.size, self._goal)

    async def reserve(self) -> None:
        """Reserve the rest while the hub serves. Where memory runs out, the arena keeps what it has by then."""
        started, loop = time.monotonic(), asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "blendhub-arena", partial(let_others_run_first, NICENESS)) as aside:
            while self.progress.left:
                try:
                    await loop.run_in_executor(aside, self._reserve_step)
                except OSError as error:
                    self._goal = self.extents.size
                    log.warning(
                        "the arena has %s: no more memory could be reserved (%s). To have more, free memory or widen "
                        "the limit of this control group, then restart the hub; otherwise set arena_gib to %.2f",
                        self.describe(), error, self._goal / 2**30,
                    )  # fmt: skip
                self._grow()
        if self._reserved_bytes > STEP:
            log.info("the arena of %s was reserved in %.0f s", self.describe(), time.monotonic() - started)

    def describe(self) -> str:
        """The size in words, and how far it is reserved."""
        reserved, goal = self.progress
        if reserved < goal:
            return f"{_size(reserved)}, and {_size(goal)} when all is reserved"
        missing = f" of the {_size(self.name.size)} that it was to have" if goal < self.name.size else ""
        return f"{_size(goal)}{missing}"

    def slot(self, offset: int, size: int) -> memoryview:
        """The bytes of a slot."""
        return memoryview(self._memory)[HEADER_BYTES + offset : HEADER_BYTES + offset + size]

    def is_mapped_by(self, mapping: int) -> bool:
        """Whether a process still has a client's mapping: the one that created it, or one forked from that process."""
        return is_byte_locked(self._fd, mapping)

    def close(self) -> None:
        """Remove the segment; processes that map it keep its bytes. Closing twice is fine."""
        with self._in_step:
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

    def _grow(self) -> None:
        """Let slots have what is reserved, and clients know it."""
        self.extents.grow(self._reserved_bytes - HEADER_BYTES)
        numbers = np.array(self.progress, np.uint64)
        self._memory[PROGRESS_AT:HEADER_BYTES] = numbers.tobytes()

    def _reserve_step(self) -> None:
        with self._in_step:
            if self._fd < 0:  # closed meanwhile
                return
            at = self._reserved_bytes
            size = min(STEP, self._file_bytes - at)
            if available_bytes() < size + SPARE_BYTES:
                raise OSError(errno.ENOMEM, "the machine or this control group has hardly any memory left")
            self._reserve_range(at, size)
            self._reserved_bytes = at + size

    def _allocate(self, at: int, size: int) -> None:
        """Reserve memory with pages of the size that the file system gives without advice."""
        os.posix_fallocate(self._fd, at, size)

    def _touch(self, at: int, size: int) -> None:
        """Reserve memory with huge pages: the file system follows the mapping's advice only where it is touched."""
        address = self._address + at
        try:
            madvise(address, size, MADV_POPULATE_WRITE)
            # The pages stay in the file. This process does not need them in its page tables.
            madvise(address, size, mmap.MADV_DONTNEED)
        except OSError as error:
            if error.errno == errno.EINVAL:  # Linux before 5.14
                self._allocate(at, size)
            elif error.errno == errno.EFAULT:  # an access would fail with SIGBUS
                madvise(address, size, MADV_REMOVE)  # the pages that the step has made
                raise OSError(errno.ENOSPC, "no memory is left") from error
            else:
                raise

    def _interleave(self) -> None:
        """Have the pages lie on all NUMA nodes in turn: engines of all nodes copy from them and into them."""
        nodes = memory_nodes()
        if len(nodes) < 2:
            return
        try:
            interleave(self._address, self._file_bytes, nodes)
        except OSError as error:
            log.warning(
                "the arena lies on the NUMA node of the hub, not on all of %s in turn: %s; a container needs "
                "--cap-add SYS_NICE, or start the hub with numactl --interleave=all",
                nodes, error,
            )  # fmt: skip


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"


def _too_small(size: int) -> HubError:
    free = free_shared_bytes()
    return HubError(
        f"{SHM} has {free / 2**20:.0f} MiB free, and the arena needs {(size + HEADER_BYTES) / 2**20:.0f} MiB; "
        f"make it larger ({SHM_ADVICE}) or set arena_gib to at most "
        f"{max(free - HEADER_BYTES, 0) / 2**30:.2f}"
    )
