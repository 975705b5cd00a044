"""Starts kernels: what they must know of pages and layout, and the tiles of each batch."""

from math import gcd
from typing import Any

import numpy as np
import torch

from blendhub.layout import ITEM_SIZES
from blendhub_cuda import kernels
from blendhub_cuda.numbers import ITEMS
from blendhub_cuda.pages import Pages
from blendhub_cuda.records import ORIGIN
from blendhub_cuda.runtime import Runtime
from blendhub_cuda.tiles import Batch, Cutter


class Launcher:
    def __init__(self, runtime: Runtime, pages: Pages, cutter: Cutter, block_size: int, device: torch.device) -> None:
        layout = cutter.layout
        self._runtime = runtime
        self._pages = pages
        self._item_bytes = ITEM_SIZES[layout.dtype]
        self._planes = torch.from_numpy(pages.planes).to(device)
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

    def rows_to_pages(self, stream: Any, base: int, table: torch.Tensor, batch: Batch) -> None:
        """Scatter what lies at ``base``."""
        align = self._align(base, batch)
        turn_align = gcd(align, self._pages.turn_align)
        turning = {**self._turning, "TURN_ALIGN": turn_align, "TURN_ITEMS": turn_align // self._item_bytes}
        self._launch(stream, kernels.rows_to_pages, base, table, batch, {"ALIGN": align, **turning})

    def pages_to_rows(self, stream: Any, base: int, table: torch.Tensor, batch: Batch) -> None:
        """Gather to ``base``."""
        self._launch(stream, kernels.pages_to_rows, base, table, batch, {"ALIGN": self._align(base, batch)})

    def _align(self, base: int, batch: Batch) -> int:
        return gcd(self._pages.align, base, int(np.gcd.reduce(batch.tiles[:, ORIGIN])))

    def _launch(
        self, stream: Any, kernel: Any, base: int, table: torch.Tensor, batch: Batch, others: dict[str, Any]
    ) -> None:
        pinned = self._runtime.pinned(batch.tiles.nbytes)
        pinned.numpy()[:] = batch.tiles.view(np.uint8).reshape(-1)
        self._runtime.copy(stream, table[: batch.tiles.nbytes], pinned)
        planes = self._planes[batch.first_layer :].data_ptr()
        grid = (len(batch.tiles), batch.n_layers * self._kinds, 1)
        changing = {"base": base, "tiles": table.data_ptr(), "planes": planes}
        self._runtime.launch(stream, kernel, grid, {**changing, **self._same_always, **others})


def _next_power_of_2(number: int) -> int:
    """The smallest that is not smaller."""
    return 1 << max(number - 1, 0).bit_length()
