"""Launches the kernel with its constants, the tokens of a batch, and a table of the engine's pages."""

from math import gcd
from typing import Any

import numpy as np
import torch
from triton import next_power_of_2

from blendhub.core.layout import ITEM_SIZES, KVLayout
from blendhub.devices import ACCESS_BYTES, Batch, Mover, Pages
from blendhub.devices.batches import TABLE_ROWS, Rows
from blendhub_cuda import kernels
from blendhub_cuda.dtypes import ITEM_TYPES

TILE_BYTES = 16384
"""About the bytes that one program of the kernel copies: wide accesses, and still many programs."""
MAX_TILE_TOKENS = 64


class Launcher(Mover):
    def __init__(self, pages: Pages, layout: KVLayout, block_size: int) -> None:
        self._layer_planes = 2 if layout.value_dim else 1
        planes = np.zeros((len(pages.layers), self._layer_planes, kernels.PLANE_WORDS.value), np.int64)
        item, aligns, rotated_aligns, table_aligns, halves = ITEM_SIZES[layout.dtype], [], [], [], [0]
        for layer, records in zip(pages.layers, planes, strict=True):
            for plane, record in zip((layer.keys, layer.values), records, strict=False):
                strides = plane.stride()[:3]
                record[:4] = plane.data_ptr(), *strides
                aligns += [plane.data_ptr(), plane.shape[-1] * item, *(stride * item for stride in strides)]
            if layer.rotation is not None:
                table, half = layer.rotation.cos_sin, layer.rotation.cos_sin.shape[1] // 2
                records[0, 4:] = table.data_ptr(), half, layer.rotation.neox, layer.rotation.offset
                rotated_aligns += [half * item, layer.rotation.offset * item]
                table_aligns += [table.data_ptr(), 4 * half]
                halves.append(half)
        align = gcd(ACCESS_BYTES, *aligns)
        rotated_align = gcd(align, *rotated_aligns)
        row_bytes = max(layout.key_row_bytes, layout.value_row_bytes)
        self._pages = pages  # the addresses in ``planes`` are those of its tensors
        self._planes = torch.from_numpy(planes).to(pages.place)
        self._tile_tokens = min(1 << (max(TILE_BYTES // row_bytes, 1).bit_length() - 1), MAX_TILE_TOKENS)
        self._constants = {
            "TOKENS": self._tile_tokens,
            "BLOCK_SIZE": block_size,
            "KINDS": self._layer_planes,
            "HEADS": layout.kv_heads,
            "KEY_WIDTH": layout.key_dim,
            "KEY_COLUMNS": next_power_of_2(layout.key_dim),
            "VALUE_WIDTH": layout.value_dim,
            "VALUE_COLUMNS": next_power_of_2(max(layout.value_dim, 1)),
            "DTYPE": layout.dtype,
            "ITEM": ITEM_TYPES[item],
            "ALIGN": align,
        }
        self._rotation = {
            "HALF_COLUMNS": next_power_of_2(max(halves)) if any(halves) else 0,
            "ROTATED_ALIGN": rotated_align,
            "ROTATED_ITEMS": rotated_align // item,
            "TABLE_ALIGN": gcd(ACCESS_BYTES, *table_aligns),
        }
        # Without tokens nothing runs, but kernels are compiled.
        nothing = Batch(np.zeros((TABLE_ROWS, 0), np.int32), 0, 0, False, 0, layout.layers, Rows(0, 0, 0))
        memory = torch.empty(1, dtype=torch.uint8, device=pages.place)
        self.rows_to_pages(memory, memory, nothing)
        self.pages_to_rows(memory, memory, nothing)

    def rows_to_pages(self, memory: torch.Tensor, table: torch.Tensor, batch: Batch) -> None:
        self._launch(memory, table, batch, TO_PAGES=True, **self._rotation)

    def pages_to_rows(self, memory: torch.Tensor, table: torch.Tensor, batch: Batch) -> None:
        self._launch(memory, table, batch, TO_PAGES=False, **{**self._rotation, "HALF_COLUMNS": 0})

    def _launch(self, memory: torch.Tensor, table: torch.Tensor, batch: Batch, **constants: Any) -> None:
        n_tiles, n_planes = -(-batch.n_tokens // self._tile_tokens), batch.n_layers * self._layer_planes
        planes = self._planes.data_ptr() + self._planes[0].nbytes * batch.first_layer
        base, tables = memory.data_ptr() + batch.rows.at, (table.data_ptr(), batch.table.shape[1])
        counts = batch.rows.first, batch.rows.n_rows, batch.n_tokens, int(batch.moved)
        kernels.copy_tokens[n_tiles, n_planes, 1](base, planes, *tables, *counts, **self._constants, **constants)
