"""The CPU device: pages and arena both lie in host memory, and a thread pool copies between them."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blendhub.contracts import Device, PagedLayer, Segment, Transfer
from blendhub.core.errors import InvalidInput
from blendhub.core.layout import KVLayout
from blendhub.devices import BLOCK_SPAN_RECORD, Bounds, check_arena, check_writable, split_at_blocks
from blendhub_cpu import kernels
from blendhub_cpu.dtypes import CARRIERS
from blendhub_cpu.options import CpuOptions
from blendhub_cpu.pages import Pages, read_pages

MAX_THREADS = 4
"""More threads do not copy faster: memory bandwidth is the limit."""


class CpuTransfer(Transfer):
    def __init__(self, jobs: Sequence[Future[None]]) -> None:
        self._jobs = jobs

    def done(self) -> bool:
        return all(job.done() for job in self._jobs)

    def wait(self) -> None:
        wait(self._jobs)
        for job in self._jobs:
            job.result()


class _Attached(NamedTuple):
    """The state that ``attach`` creates and ``close`` drops."""

    pages: Pages
    bounds: Bounds
    block_size: int
    carrier: np.dtype[Any]
    key_items: int
    """Items of one token's keys in one layer."""
    pool: ThreadPoolExecutor
    threads: int


class CpuDevice(Device):
    overlaps_compute = False

    def __init__(self, options: CpuOptions) -> None:
        self.block_tokens = options.block_tokens
        self._threads = options.threads
        self._attached: _Attached | None = None
        self._arena: npt.NDArray[np.uint8] | None = None
        self._closed = False

    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        if self._closed or self._attached:
            raise InvalidInput("a device is attached once; create another one for other pages")
        pages = read_pages(layers, block_size, layout)
        cores = usable_cores()
        threads = self._threads or min(len(cores), MAX_THREADS)
        self._attached = _Attached(
            pages=pages,
            bounds=Bounds(layout, block_size, pages.n_blocks, pages.n_positions),
            block_size=block_size,
            carrier=CARRIERS[layout.dtype],
            key_items=layout.kv_heads * layout.key_dim,
            pool=ThreadPoolExecutor(threads, "blendhub-cpu", initializer=set_affinity, initargs=(cores,)),
            threads=threads,
        )
        # Compiles the kernels now, so that the first request does not wait for it.
        no_spans, no_arena = np.empty(0, BLOCK_SPAN_RECORD), np.empty(0, np.uint8)
        _load(self._attached, no_arena, no_spans)
        _save(self._attached, no_arena, no_spans)

    def pin(self, arena: npt.NDArray[np.uint8]) -> None:
        if self._closed:
            raise InvalidInput("this device is closed; create another one")
        check_arena(arena)
        self._arena = arena

    def load(
        self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], skip_prefix_n_tokens: int = 0
    ) -> Transfer:
        attached, arena = self._ready()
        attached.bounds.check(segments, block_ids, arena.size)
        attached.bounds.check_load(segments, skip_prefix_n_tokens)
        spans = split_at_blocks(segments, block_ids, attached.block_size, skip_prefix_n_tokens)
        return _start(_load, attached, arena, spans)

    def save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64]) -> Transfer:
        attached, arena = self._ready()
        attached.bounds.check(segments, block_ids, arena.size)
        check_writable(arena)
        return _start(_save, attached, arena, split_at_blocks(segments, block_ids, attached.block_size))

    def close(self) -> None:
        if self._attached:
            self._attached.pool.shutdown()
        self._closed = True
        self._attached = self._arena = None

    def _ready(self) -> tuple[_Attached, npt.NDArray[np.uint8]]:
        if self._attached is None or self._arena is None:
            problem = "is closed" if self._closed else "needs attach and pin before it can copy"
            raise InvalidInput(f"device 'cpu' {problem}")
        return self._attached, self._arena


def _start(
    copy: Callable[[_Attached, npt.NDArray[np.uint8], npt.NDArray[Any]], None],
    attached: _Attached,
    arena: npt.NDArray[np.uint8],
    spans: npt.NDArray[Any],
) -> CpuTransfer:
    # Each job keeps a reference to the arena, so that another one may be pinned meanwhile.
    shares = [share for share in np.array_split(spans, attached.threads) if len(share)]
    return CpuTransfer([attached.pool.submit(copy, attached, arena, share) for share in shares])


def _load(attached: _Attached, arena: npt.NDArray[np.uint8], spans: npt.NDArray[Any]) -> None:
    planes, rotations = attached.pages.planes, attached.pages.rotations
    rotated_keys = np.empty(attached.block_size * attached.key_items, attached.carrier)
    angles = np.empty(attached.block_size * 2 * max(rotations["half"], default=0), np.float32)
    kernels.rows_to_pages(arena.ctypes.data, spans, planes, rotations, rotated_keys, angles)


def _save(attached: _Attached, arena: npt.NDArray[np.uint8], spans: npt.NDArray[Any]) -> None:
    kernels.pages_to_rows(arena.ctypes.data, spans, attached.pages.planes, np.empty(1, attached.carrier))


def usable_cores() -> set[int]:
    """The cores that any thread of this process may use.

    Engines pin the thread that creates the device to one core, and new threads would inherit that affinity.
    """
    try:
        tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    except OSError:
        return set(range(os.cpu_count() or 1))
    cores: set[int] = set()
    for task in tasks:
        with suppress(ProcessLookupError):  # the thread ended meanwhile
            cores |= os.sched_getaffinity(task)
    return cores


def set_affinity(cores: set[int]) -> None:
    """Allow the calling thread to use these cores. Systems that refuse leave it on the cores it was started on."""
    with suppress(AttributeError, OSError):
        os.sched_setaffinity(0, cores)
