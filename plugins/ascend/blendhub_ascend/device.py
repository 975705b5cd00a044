"""The Ascend device: pages lie in NPU memory, and transfers run beside the engine's work."""

from collections.abc import Callable, Sequence

import torch

from blendhub.contracts import PagedLayer
from blendhub.core.layout import KVLayout
from blendhub.devices import Runtime, StreamDevice
from blendhub_ascend import AscendOptions
from blendhub_ascend.batches import TokenPlanner
from blendhub_ascend.chips import chip_of
from blendhub_ascend.fast_ops import choose
from blendhub_ascend.mover import PageMover
from blendhub_ascend.pages import FORMATS, TYPES, Pages, read_pages


class AscendDevice(StreamDevice):
    torch_type = "npu"
    formats = FORMATS
    dtypes = tuple(TYPES)
    name = "npu"
    streams_per_queue = 3
    """While one stream copies, the next one rotates, and the third writes pages."""

    def __init__(
        self, options: AscendOptions, runtime: Callable[[torch.device], Runtime], soc_version: Callable[[], int]
    ) -> None:
        super().__init__(options.staging_mib, runtime)
        self.block_tokens = options.block_tokens
        self._fast_ops = options.fast_ops
        self._soc_version = soc_version

    def _read_pages(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> Pages:
        return read_pages(layers, block_size, layout)

    def _planner(self, layout: KVLayout, block_size: int, stream_bytes: int) -> TokenPlanner:
        return TokenPlanner(layout, block_size, stream_bytes)

    def _mover(self, runtime: Runtime, pages: Pages, planner: TokenPlanner, block_size: int) -> PageMover:
        chosen = choose(chip_of(self._soc_version()), pages, self._fast_ops)
        return PageMover(runtime, pages, planner, chosen)
