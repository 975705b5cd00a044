"""The CUDA device: pages lie in GPU memory, and transfers run beside the engine's work."""

from collections.abc import Callable, Sequence

import torch

from blendhub.contracts import PagedLayer
from blendhub.core.layout import KVLayout
from blendhub.devices import Runtime, StreamDevice
from blendhub_cuda import CudaOptions
from blendhub_cuda.launcher import Launcher
from blendhub_cuda.pages import ACCESS_BYTES, FORMATS, Pages, read_pages
from blendhub_cuda.runtime import CudaRuntime
from blendhub_cuda.tiles import BatchGroup, TilePlanner


class CudaDevice(StreamDevice):
    torch_type = "cuda"
    formats = FORMATS
    name = "cuda"
    streams_per_queue = 2
    arena_alignment = ACCESS_BYTES

    def __init__(self, options: CudaOptions, runtime: Callable[[torch.device], Runtime] = CudaRuntime) -> None:
        super().__init__(options.staging_mib, runtime)
        self.block_tokens = options.block_tokens

    def _read_pages(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> Pages:
        return read_pages(layers, block_size, layout)

    def _planner(self, layout: KVLayout, block_size: int, stream_bytes: int) -> TilePlanner:
        return TilePlanner(layout, block_size, stream_bytes)

    def _mover(self, runtime: Runtime, pages: Pages, planner: TilePlanner, block_size: int) -> Launcher:
        return Launcher(runtime, pages, planner, block_size)

    def _warm_up_groups(self, planner: TilePlanner) -> Sequence[BatchGroup]:
        return planner.empty_groups
