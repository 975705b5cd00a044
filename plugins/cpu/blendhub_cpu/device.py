"""The CPU device: pages and arena both lie in this machine's memory, and threads of its own copy between them."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blendhub.contracts import Device, PagedLayer, Segment, Transfer
from blendhub.devices import Bounds, check_arena, check_writable
from blendhub.errors import InvalidInput
from blendhub.layout import KVLayout
from blendhub_cpu import kernels
from blendhub_cpu.items import CARRIERS
from blendhub_cpu.options import CpuOptions
from blendhub_cpu.pages import Pages, read_pages
from blendhub_cpu.pieces import pieces_of

MOST_THREADS = 4
"""More do not copy faster: memory is the limit."""


class CpuTransfer(Transfer):
    def __init__(self, jobs: Sequence[Future[None]]) -> None:
        self._jobs = jobs

    def done(self) -> bool:
        return all(job.done() for job in self._jobs)

    def wait(self) -> None:
        wait(self._jobs)
        for job in self._jobs:
            job.result()


class _Engine(NamedTuple):
    """What the device knows since ``attach``."""

    pages: Pages
    bounds: Bounds
    block_size: int
    carrier: np.dtype[Any]
    key_items: int
    """Numbers of one token's keys in one layer."""
    pool: ThreadPoolExecutor
    threads: int


class CpuDevice(Device):
    on_the_side = False

    def __init__(self, options: CpuOptions) -> None:
        self.block_tokens = options.block_tokens
        self._threads = options.threads
        self._engine: _Engine | None = None
        self._arena: npt.NDArray[np.uint8] | None = None
        self._closed = False

    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        if self._closed or self._engine:
            raise InvalidInput("a device is attached once; create another one for other pages")
        pages = read_pages(layers, block_size, layout)
        cores = usable_cores()
        threads = self._threads or min(len(cores), MOST_THREADS)
        self._engine = _Engine(
            pages=pages,
            bounds=Bounds(layout, block_size, pages.n_blocks, pages.n_positions),
            block_size=block_size,
            carrier=CARRIERS[layout.dtype],
            key_items=layout.kv_heads * layout.key_dim,
            pool=ThreadPoolExecutor(threads, "blendhub-cpu", initializer=run_on, initargs=(cores,)),
            threads=threads,
        )
        # So that compiling holds up the start and not the first request.
        nothing, nowhere = np.empty(0, kernels.PIECE_RECORD), np.empty(0, np.uint8)
        _load(self._engine, nowhere, nothing)
        _save(self._engine, nowhere, nothing)

    def pin(self, arena: npt.NDArray[np.uint8]) -> None:
        if self._closed:
            raise InvalidInput("this device is closed; create another one")
        check_arena(arena)
        self._arena = arena

    def load(
        self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], skip_prefix_n_tokens: int = 0
    ) -> Transfer:
        engine, arena = self._ready()
        engine.bounds.check(segments, block_ids, arena.size)
        engine.bounds.check_load(segments, skip_prefix_n_tokens)
        return _start(_load, engine, arena, pieces_of(segments, block_ids, engine.block_size, skip_prefix_n_tokens))

    def save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64]) -> Transfer:
        engine, arena = self._ready()
        engine.bounds.check(segments, block_ids, arena.size)
        check_writable(arena)
        return _start(_save, engine, arena, pieces_of(segments, block_ids, engine.block_size))

    def close(self) -> None:
        if self._engine:
            self._engine.pool.shutdown()
        self._closed = True
        self._engine = self._arena = None

    def describe(self) -> dict[str, Any]:
        if not self._engine:
            return {}
        return {"threads": self._engine.threads, "blocks": self._engine.pages.n_blocks}

    def _ready(self) -> tuple[_Engine, npt.NDArray[np.uint8]]:
        if self._engine is None or self._arena is None:
            wanted = "is closed" if self._closed else "needs attach and pin before it can copy"
            raise InvalidInput(f"device 'cpu' {wanted}")
        return self._engine, self._arena


def _start(
    copy: Callable[[_Engine, npt.NDArray[np.uint8], npt.NDArray[Any]], None],
    engine: _Engine,
    arena: npt.NDArray[np.uint8],
    pieces: npt.NDArray[Any],
) -> CpuTransfer:
    # Shares of neighbours; each job holds the arena, so that another one may be pinned meanwhile.
    shares = [share for share in np.array_split(pieces, engine.threads) if len(share)]
    return CpuTransfer([engine.pool.submit(copy, engine, arena, share) for share in shares])


def _load(engine: _Engine, arena: npt.NDArray[np.uint8], pieces: npt.NDArray[Any]) -> None:
    planes, rotations = engine.pages.planes, engine.pages.rotations
    turned = np.empty(engine.block_size * engine.key_items, engine.carrier)
    angles = np.empty(engine.block_size * 2 * max(rotations["half"], default=0), np.float32)
    kernels.rows_to_pages(arena.ctypes.data, pieces, planes, rotations, turned, angles)


def _save(engine: _Engine, arena: npt.NDArray[np.uint8], pieces: npt.NDArray[Any]) -> None:
    kernels.pages_to_rows(arena.ctypes.data, pieces, engine.pages.planes, np.empty(1, engine.carrier))


def usable_cores() -> set[int]:
    """The cores that any thread of this process may use.

    Engines pin the thread that starts us to one core, and our threads would inherit that.
    """
    try:
        tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    except OSError:
        return set(range(os.cpu_count() or 1))
    cores: set[int] = set()
    for task in tasks:
        with suppress(ProcessLookupError):  # a thread that ended just now
            cores |= os.sched_getaffinity(task)
    return cores


def run_on(cores: set[int]) -> None:
    """Let the calling thread use these cores, if the system allows that; it also works where it was started."""
    with suppress(AttributeError, OSError):
        os.sched_setaffinity(0, cores)
