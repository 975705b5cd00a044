"""Launches the kernels with their constants and the tiles of a batch."""

from math import gcd
from typing import Any, NamedTuple

import torch

from blendhub.core.layout import ITEM_SIZES
from blendhub.devices import Mover, Runtime
from blendhub_cuda import kernels
from blendhub_cuda.dtypes import ITEM_TYPES
from blendhub_cuda.pages import Pages
from blendhub_cuda.tiles import Batch, BatchGroup, TilePlanner


class GridKernel(NamedTuple):
    """A kernel of Triton's with its grid."""

    kernel: Any
    grid: tuple[int, int, int]

    def __call__(self, **arguments: Any) -> None:
        self.kernel[self.grid](**arguments)


class Launcher(Mover):
    def __init__(self, runtime: Runtime, pages: Pages, planner: TilePlanner, block_size: int) -> None:
        layout = planner.layout
        self._runtime = runtime
        self._pages = pages
        self._item_bytes = ITEM_SIZES[layout.dtype]
        self._layout = layout
        self._tile_bytes = 8 * planner.tile_words
        self._kept_planes = torch.from_numpy(pages.planes).to(pages.place)
        self._planes = self._kept_planes.data_ptr()
        self._layer_planes_bytes = pages.planes[0].nbytes
        self._kinds = pages.planes.shape[1]
        self._constants = {
            "TILE_WORDS": planner.tile_words,
            "TOKENS": planner.tile_tokens,
            "BLOCK_SIZE": block_size,
            "KINDS": self._kinds,
            "HEADS": layout.kv_heads,
            "KEY_WIDTH": layout.key_dim,
            "KEY_COLUMNS": _ceil_power_of_2(layout.key_dim),
            "VALUE_WIDTH": layout.value_dim,
            "VALUE_COLUMNS": _ceil_power_of_2(layout.value_dim),
            "ITEM": ITEM_TYPES[layout.dtype],
        }
        self._rotation_constants = {
            "DTYPE": layout.dtype,
            "HALF_COLUMNS": _ceil_power_of_2(pages.widest_half) if pages.widest_half else 0,
            "TABLE_ALIGN": pages.table_align,
        }

    def rows_to_pages(
        self, stream: Any, memory: torch.Tensor, table: torch.Tensor, group: BatchGroup, batch: Batch
    ) -> None:
        base = memory.data_ptr()
        align = self._align(base, group, batch)
        rotated_align = gcd(align, self._pages.rotated_align)
        alignment = {
            "ALIGN": align,
            "ROTATED_ALIGN": rotated_align,
            "ROTATED_ITEMS": rotated_align // self._item_bytes,
        }
        constants = {**alignment, **self._rotation_constants}
        self._launch(stream, kernels.rows_to_pages, base, table, batch, constants)

    def pages_to_rows(
        self, stream: Any, memory: torch.Tensor, table: torch.Tensor, group: BatchGroup, batch: Batch
    ) -> None:
        base = memory.data_ptr()
        align = self._align(base, group, batch)
        self._launch(stream, kernels.pages_to_rows, base, table, batch, {"ALIGN": align})

    def _align(self, base: int, group: BatchGroup, batch: Batch) -> int:
        """The alignment of pages if rows in memory have it too, else that of items: no third variant is compiled."""
        is_aligned = gcd(self._layer_0(base, batch), group.align) % self._pages.align == 0
        return self._pages.align if is_aligned else self._item_bytes

    def _layer_0(self, base: int, batch: Batch) -> int:
        """The address of layer 0 if the batch's first layer is at ``base``."""
        return base - self._layout.keys_at(batch.first_layer)

    def _launch(
        self, stream: Any, kernel: Any, base: int, table: torch.Tensor, batch: Batch, others: dict[str, Any]
    ) -> None:
        changing = {
            "base": self._layer_0(base, batch),
            "tiles": table.data_ptr() + batch.tiles.start * self._tile_bytes,
            "planes": self._planes + batch.first_layer * self._layer_planes_bytes,
        }
        grid = (len(batch.tiles), batch.n_layers * self._kinds, 1)
        self._runtime.launch(stream, GridKernel(kernel, grid), {**changing, **self._constants, **others})


def _ceil_power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least ``number``."""
    return 1 << max(number - 1, 0).bit_length()
