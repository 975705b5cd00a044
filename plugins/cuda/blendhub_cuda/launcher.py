"""Starts kernels: what they must know of pages and layout, and the tiles of each batch."""

from math import gcd
from typing import Any

import numpy as np
import torch

from blendhub.layout import ITEM_SIZES
from blendhub_cuda import kernels
from blendhub_cuda.numbers import ITEMS
from blendhub_cuda.pages import Pages
from blendhub_cuda.runtime import Runtime
from blendhub_cuda.tiles import Batch, Cutter, Work


class Launcher:
    def __init__(self, runtime: Runtime, pages: Pages, cutter: Cutter, block_size: int, device: torch.device) -> None:
        layout = cutter.layout
        self._runtime = runtime
        self._pages = pages
        self._item_bytes = ITEM_SIZES[layout.dtype]
        self._layout = layout
        self._tile_bytes = 8 * cutter.tile_words
        self._kept_planes = torch.from_numpy(pages.planes).to(device)
        self._planes = self._kept_planes.data_ptr()
        self._layer_planes_bytes = pages.planes[0].nbytes
        self._kinds = pages.planes.shape[1]
        self._same_always = {
            "TILE_WORDS": cutter.tile_words,
            "TOKENS": cutter.tile_tokens,
            "BLOCK_SIZE": block_size,
            "KINDS": self._kinds,
            "HEADS": layout.kv_heads,
            "KEY_WIDTH": layout.key_dim,
            "KEY_COLUMNS": _next_power_of_2(layout.key_dim),
            "VALUE_WIDTH": layout.value_dim,
            "VALUE_COLUMNS": _next_power_of_2(layout.value_dim),
            "ITEM": ITEMS[layout.dtype],
        }
        self._turning = {
            "DTYPE": layout.dtype,
            "HALF_COLUMNS": _next_power_of_2(pages.widest_half) if pages.widest_half else 0,
            "TABLE_ALIGN": pages.table_align,
        }

    def table(self, work: Work) -> torch.Tensor:
        """The tiles of work, where the GPU can fetch them."""
        pinned = self._runtime.pinned(work.tiles.nbytes)
        pinned.numpy()[:] = work.tiles.view(np.uint8).reshape(-1)
        return pinned

    def rows_to_pages(self, stream: Any, base: int, table: torch.Tensor, work: Work, batch: Batch) -> None:
        """Scatter the batch, which lies at ``base``; the GPU has the table of the work."""
        align = self._align(base, work, batch)
        turn_align = gcd(align, self._pages.turn_align)
        turning = {**self._turning, "TURN_ALIGN": turn_align, "TURN_ITEMS": turn_align // self._item_bytes}
        self._launch(stream, kernels.rows_to_pages, base, table, batch, {"ALIGN": align, **turning})

    def pages_to_rows(self, stream: Any, base: int, table: torch.Tensor, work: Work, batch: Batch) -> None:
        """Gather the batch to ``base``; the GPU has the table of the work."""
        align = self._align(base, work, batch)
        self._launch(stream, kernels.pages_to_rows, base, table, batch, {"ALIGN": align})

    def _align(self, base: int, work: Work, batch: Batch) -> int:
        return gcd(self._pages.align, self._layer_0(base, batch), work.align)

    def _layer_0(self, base: int, batch: Batch) -> int:
        """Where the first layer of all would begin, if the batch's first one begins at ``base``."""
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
        self._runtime.launch(stream, kernel, grid, {**changing, **self._same_always, **others})


def _next_power_of_2(number: int) -> int:
    """The smallest that is not smaller."""
    return 1 << max(number - 1, 0).bit_length()
