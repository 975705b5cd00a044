"""The CUDA device: pages lie in GPU memory, and transfers run beside the engine's work."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import Device, PagedLayer, Segment, Transfer
from blendhub.devices import Bounds, Runtime, check_arena, check_writable
from blendhub.errors import InvalidInput
from blendhub.layout import KVLayout
from blendhub_cuda.launcher import Launcher
from blendhub_cuda.options import CudaOptions
from blendhub_cuda.pages import ACCESS_BYTES, FORMATS, read_pages
from blendhub_cuda.runtime import CudaRuntime, HostArena
from blendhub_cuda.streams import STREAMS_PER_QUEUE, LoadQueue, SaveQueue
from blendhub_cuda.tiles import BatchPlanner


class _Attached(NamedTuple):
    """The state that ``attach`` creates and ``close`` drops."""

    runtime: Runtime
    bounds: Bounds
    planner: BatchPlanner
    loads: LoadQueue
    saves: SaveQueue


class CudaDevice(Device):
    torch_type = "cuda"
    formats = FORMATS

    def __init__(self, options: CudaOptions, runtime: Callable[[torch.device], Runtime] = CudaRuntime) -> None:
        self.block_tokens = options.block_tokens
        self._staging_mib = options.staging_mib
        self._runtime = runtime
        self._attached: _Attached | None = None
        self._arena_bytes: npt.NDArray[np.uint8] | None = None
        self._arena: HostArena | None = None
        self._closed = False

    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        if self._closed or self._attached:
            raise InvalidInput("a device is attached once; create another one for other pages")
        pages = read_pages(layers, block_size, layout)
        planner = self._planner(layout, block_size)
        device = layers[0].tensors[0].device
        runtime = self._runtime(device)
        launcher = Launcher(runtime, pages, planner, block_size, device)
        self._attached = _Attached(
            runtime,
            Bounds(layout, block_size, pages.n_blocks, pages.n_positions),
            planner,
            LoadQueue("loads", runtime, launcher, planner),
            SaveQueue("saves", runtime, launcher, planner),
        )
        self._attached.loads.warm_up()
        self._attached.saves.warm_up()
        if self._arena_bytes is not None:
            self._arena = HostArena(self._arena_bytes, runtime)

    def pin(self, arena: npt.NDArray[np.uint8]) -> None:
        if self._closed:
            raise InvalidInput("this device is closed; create another one")
        check_arena(arena)
        if arena.ctypes.data % ACCESS_BYTES:
            raise InvalidInput(
                f"an arena must begin at a multiple of {ACCESS_BYTES} bytes, got address {arena.ctypes.data:#x}"
            )
        self._release_arena()
        self._arena_bytes = arena
        if self._attached:
            self._arena = HostArena(arena, self._attached.runtime)

    def load(
        self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], skip_prefix_n_tokens: int = 0
    ) -> Transfer:
        attached, arena = self._ready()
        attached.bounds.check(segments, block_ids, arena.bytes.size)
        attached.bounds.check_load(segments, skip_prefix_n_tokens)
        groups = attached.planner.batch_groups(
            tuple(segments), block_ids.copy(), skip_prefix_n_tokens, stage_partial_chunks=not arena.is_registered
        )
        return attached.loads.start(arena, groups)

    def save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64]) -> Transfer:
        attached, arena = self._ready()
        attached.bounds.check(segments, block_ids, arena.bytes.size)
        check_writable(arena.bytes)
        groups = attached.planner.batch_groups(
            tuple(segments), block_ids.copy(), 0, stage_partial_chunks=not arena.is_registered
        )
        return attached.saves.start(arena, groups)

    def close(self) -> None:
        self._release_arena()
        if self._attached:
            self._attached.loads.close()
            self._attached.saves.close()
        self._closed = True
        self._attached = None

    def _planner(self, layout: KVLayout, block_size: int) -> BatchPlanner:
        stream_bytes = int(self._staging_mib * 2**20) // (2 * STREAMS_PER_QUEUE) // 256 * 256
        planner = BatchPlanner(layout, block_size, stream_bytes)
        if planner.staging_bytes < planner.layer_bytes:
            needed = 2 * STREAMS_PER_QUEUE * (planner.table_bytes + planner.layer_bytes + 256) / 2**20
            raise InvalidInput(
                f"staging_mib = {self._staging_mib:g} is too little: a quarter of it must hold the "
                f"{planner.layer_bytes} bytes that one layer keeps of a chunk; set it to {needed:.3g} or more"
            )
        return planner

    def _release_arena(self) -> None:
        """Unpin the arena when no transfer is pending."""
        if self._attached:
            self._attached.loads.drain()
            self._attached.saves.drain()
        if self._arena:
            self._arena.close()
        self._arena = self._arena_bytes = None

    def _ready(self) -> tuple[_Attached, HostArena]:
        if self._attached is None or self._arena is None:
            problem = "is closed" if self._closed else "needs attach and pin before it can copy"
            raise InvalidInput(f"device 'cuda' {problem}")
        return self._attached, self._arena
