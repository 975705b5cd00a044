"""The CUDA device: pages lie in a GPU's memory, and are copied beside the engine's work."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import Device, PagedLayer, Segment, Transfer
from blendhub.devices import Bounds, check_arena, check_writable
from blendhub.errors import InvalidInput
from blendhub.layout import KVLayout
from blendhub_cuda.lanes import N_LANES, Loads, Saves
from blendhub_cuda.launcher import Launcher
from blendhub_cuda.options import CudaOptions
from blendhub_cuda.pages import ACCESS_BYTES, FORMATS, read_pages
from blendhub_cuda.runtime import CudaRuntime, PinnedArena, Runtime
from blendhub_cuda.tiles import Cutter


class _Engine(NamedTuple):
    """What the device knows since ``attach``."""

    runtime: Runtime
    bounds: Bounds
    cutter: Cutter
    loads: Loads
    saves: Saves


class CudaDevice(Device):
    torch_type = "cuda"
    formats = FORMATS

    def __init__(self, options: CudaOptions, runtime: Callable[[torch.device], Runtime] = CudaRuntime) -> None:
        self.block_tokens = options.block_tokens
        self._staging_mib = options.staging_mib
        self._runtime = runtime
        self._engine: _Engine | None = None
        self._given: npt.NDArray[np.uint8] | None = None
        self._arena: PinnedArena | None = None
        self._closed = False

    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        if self._closed or self._engine:
            raise InvalidInput("a device is attached once; create another one for other pages")
        pages = read_pages(layers, block_size, layout)
        cutter = self._cutter(layout, block_size)
        device = layers[0].tensors[0].device
        runtime = self._runtime(device)
        launcher = Launcher(runtime, pages, cutter, block_size, device)
        self._engine = _Engine(
            runtime,
            Bounds(layout, block_size, pages.n_blocks, pages.n_positions),
            cutter,
            Loads("loads", runtime, launcher, cutter),
            Saves("saves", runtime, launcher, cutter),
        )
        self._engine.loads.warm_up()
        self._engine.saves.warm_up()
        if self._given is not None:
            self._arena = PinnedArena(self._given, runtime)

    def pin(self, arena: npt.NDArray[np.uint8]) -> None:
        if self._closed:
            raise InvalidInput("this device is closed; create another one")
        check_arena(arena)
        if arena.ctypes.data % ACCESS_BYTES:
            raise InvalidInput(f"an arena begins at a multiple of {ACCESS_BYTES}, got address {arena.ctypes.data:#x}")
        self._let_go()
        self._given = arena
        if self._engine:
            self._arena = PinnedArena(arena, self._engine.runtime)

    def load(
        self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], skip_prefix_n_tokens: int = 0
    ) -> Transfer:
        engine, arena = self._ready()
        engine.bounds.check(segments, block_ids, arena.bytes.size)
        engine.bounds.check_load(segments, skip_prefix_n_tokens)
        stage_parts = not arena.is_registered
        work = engine.cutter.work(tuple(segments), block_ids.copy(), skip_prefix_n_tokens, stage_parts)
        return engine.loads.start(arena, work)

    def save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64]) -> Transfer:
        engine, arena = self._ready()
        engine.bounds.check(segments, block_ids, arena.bytes.size)
        check_writable(arena.bytes)
        stage_parts = not arena.is_registered
        return engine.saves.start(arena, engine.cutter.work(tuple(segments), block_ids.copy(), 0, stage_parts))

    def close(self) -> None:
        self._let_go()
        if self._engine:
            self._engine.loads.close()
            self._engine.saves.close()
        self._closed = True
        self._engine = None

    def describe(self) -> dict[str, Any]:
        if not self._engine:
            return {}
        cutter = self._engine.cutter
        return {
            "staging_bytes": 2 * N_LANES * (cutter.table_bytes + cutter.room),
            "arena": "pinned" if self._arena and self._arena.is_registered else "copied through pinned pieces",
        }

    def _cutter(self, layout: KVLayout, block_size: int) -> Cutter:
        lane_bytes = int(self._staging_mib * 2**20) // (2 * N_LANES) // 256 * 256
        cutter = Cutter(layout, block_size, lane_bytes)
        if cutter.room < cutter.layer_bytes:
            needed = 2 * N_LANES * (cutter.table_bytes + cutter.layer_bytes + 256) / 2**20
            raise InvalidInput(
                f"staging_mib = {self._staging_mib:g} is too little: a quarter of it must hold the "
                f"{cutter.layer_bytes} bytes that one layer keeps of a chunk; set it to {needed:.3g} or more"
            )
        return cutter

    def _let_go(self) -> None:
        """Of the arena, when nothing is under way any more."""
        if self._engine:
            self._engine.loads.drain()
            self._engine.saves.drain()
        if self._arena:
            self._arena.close()
        self._arena = self._given = None

    def _ready(self) -> tuple[_Engine, PinnedArena]:
        if self._engine is None or self._arena is None:
            wanted = "is closed" if self._closed else "needs attach and pin before it can copy"
            raise InvalidInput(f"device 'cuda' {wanted}")
        return self._engine, self._arena
