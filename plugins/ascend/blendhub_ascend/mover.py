"""Moves a batch between staging and pages, in a stream: rotates keys, and writes or reads every layer's pages."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from blendhub.devices import Mover, Runtime
from blendhub_ascend.batches import (
    POSITION,
    SLOT,
    SOURCE,
    SPAN_BLOCK,
    SPAN_COUNT,
    TABLE_ROWS,
    Batch,
    BatchGroup,
    TokenPlanner,
)
from blendhub_ascend.fast_ops import FastOps
from blendhub_ascend.pages import TYPES, Pages, Planes, as_bits
from blendhub_ascend.rotation import Angles, angles_between, rotate


class PageMover(Mover):
    def __init__(self, runtime: Runtime, pages: Pages, planner: TokenPlanner, fast_ops: FastOps) -> None:
        self._runtime = runtime
        self._layers = pages.layers
        self._layout = planner.layout
        self._fast_ops = fast_ops

    def rows_to_pages(
        self, stream: Any, memory: torch.Tensor, table: torch.Tensor, group: BatchGroup, batch: Batch
    ) -> None:
        self._runtime.launch(stream, self._write, {"memory": memory, "table": table, "batch": batch})

    def pages_to_rows(
        self, stream: Any, memory: torch.Tensor, table: torch.Tensor, group: BatchGroup, batch: Batch
    ) -> None:
        self._runtime.launch(stream, self._read, {"memory": memory, "table": table, "batch": batch})

    def _write(self, memory: torch.Tensor, table: torch.Tensor, batch: Batch) -> None:
        keys, values = self._staged(memory, batch)
        columns = _rows_of(table)[:, batch.first_column : batch.first_column + batch.n_tokens]
        if batch.moved:
            self._rotate(keys, columns[SOURCE], columns[POSITION], batch)
        for layer, some_keys, some_values in zip(self._layers_of(batch), keys, values, strict=True):
            if self._fast_ops.scatter:
                self._fast_ops.scatter(some_keys, some_values, layer.keys, layer.values, columns[SLOT])
            else:
                for page, rows in _in_blocks(batch, layer, some_keys, some_values):
                    page.copy_(rows)

    def _read(self, memory: torch.Tensor, table: torch.Tensor, batch: Batch) -> None:
        keys, values = self._staged(memory, batch)
        columns = _rows_of(table)[:, batch.first_column : batch.first_column + len(batch.spans)]
        gather = self._fast_ops.gather if all(span.slot == 0 for span in batch.spans) else None
        for layer, some_keys, some_values in zip(self._layers_of(batch), keys, values, strict=True):
            if gather:
                gather(some_keys, some_values, layer.keys, layer.values, columns[SPAN_BLOCK], columns[SPAN_COUNT])
            else:
                for page, rows in _in_blocks(batch, layer, some_keys, some_values):
                    rows.copy_(page)

    def _layers_of(self, batch: Batch) -> tuple[Planes, ...]:
        return self._layers[batch.first_layer : batch.first_layer + batch.n_layers]

    def _staged(self, memory: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch's keys and values in staging, as ``[layers, tokens, heads, width]``."""
        layout = self._layout
        n_keys, n_values = (batch.n_tokens * layout.kv_heads * width for width in (layout.key_dim, layout.value_dim))
        items = memory.view(TYPES[layout.dtype])[: batch.n_layers * (n_keys + n_values)]
        keys, values = items.view(batch.n_layers, n_keys + n_values).split_with_sizes([n_keys, n_values], 1)
        shape = batch.n_tokens, layout.kv_heads
        return keys.unflatten(1, (*shape, layout.key_dim)), values.unflatten(1, (*shape, layout.value_dim))

    def _rotate(self, keys: torch.Tensor, old: torch.Tensor, new: torch.Tensor, batch: Batch) -> None:
        """Rotate the keys in staging: layers that follow each other and rotate alike at once."""
        known: dict[int, Angles] = {}
        rotations = [layer.rotation for layer in self._layers_of(batch)]
        end = 0
        for _, alike in itertools.groupby(rotations, lambda one: one and (id(one.cos_sin), one.neox, one.offset)):
            some = list(alike)
            first, end = end, end + len(some)
            rotation = some[0]
            if rotation is not None:
                table = rotation.cos_sin
                if id(table) not in known:
                    known[id(table)] = angles_between(table, old, new)
                rotate(keys[first:end], rotation, known[id(table)])


def _rows_of(table: torch.Tensor) -> torch.Tensor:
    return table.view(torch.int32).view(TABLE_ROWS, -1)


def _in_blocks(
    batch: Batch, layer: Planes, keys: torch.Tensor, values: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each block span in the pages, and its rows in staging; all as integers.

    Each copy writes one view of a block. An index over the whole plane would, where the pages are not contiguous,
    have torch_npu copy all pages to a temporary and back, over what other requests wrote meanwhile.
    """
    for plane, rows in ((layer.keys, keys), (layer.values, values)):
        if not rows.shape[-1]:
            continue
        pages, given, at = as_bits(plane), as_bits(rows), 0
        for block, slot, count in batch.spans:
            yield pages[block, slot : slot + count], given[at : at + count]
            at += count
