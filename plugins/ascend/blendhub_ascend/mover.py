"""Moves a batch between staging and pages, in a stream: rotates keys, and writes or reads every layer's pages."""

import itertools
from collections.abc import Iterator, Sequence

import torch

from blendhub.core.layout import KVLayout
from blendhub.devices import Angles, Batch, Mover, Pages, Planes, angles_between, pairs_of, torch_type
from blendhub.devices.batches import POSITION, SLOT, SOURCE, SPAN_BLOCK, SPAN_COUNT, TABLE_ROWS, BlockSpan
from blendhub_ascend.operators import Chip, as_bits, choose


class PageMover(Mover):
    def __init__(self, pages: Pages, layout: KVLayout, chip: Chip, fast_ops: bool) -> None:
        self._layers = tuple(
            Planes(layer.keys.transpose(1, 2), layer.values.transpose(1, 2), layer.rotation) for layer in pages.layers
        )
        """Keys and values as ``[blocks, tokens, heads, width]``."""
        self.operators = choose(chip, self._layers, fast_ops)
        self._layout = layout
        self._block_size = self._layers[0].keys.shape[1]

    def rows_to_pages(self, memory: torch.Tensor, table: torch.Tensor, batch: Batch) -> None:
        keys, values = self._staged(memory, batch)
        columns = table.view(torch.int32).view(TABLE_ROWS, -1)[:, : batch.n_tokens]
        if batch.moved:
            self._rotate(keys, columns[SOURCE], columns[POSITION], batch)
        spans = [] if self.operators.scatter else batch.spans(self._block_size)
        for layer, some_keys, some_values in zip(self._layers_of(batch), keys, values, strict=True):
            if self.operators.scatter:
                self.operators.scatter(some_keys, some_values, layer.keys, layer.values, columns[SLOT])
            else:
                for page, rows in _in_blocks(spans, layer, some_keys, some_values):
                    page.copy_(rows)

    def pages_to_rows(self, memory: torch.Tensor, table: torch.Tensor, batch: Batch) -> None:
        keys, values = self._staged(memory, batch)
        spans = batch.spans(self._block_size)
        columns = table.view(torch.int32).view(TABLE_ROWS, -1)[:, : len(spans)]
        blocks, counts = columns[SPAN_BLOCK][:, None], columns[SPAN_COUNT]
        gather = self.operators.gather if all(span.slot == 0 for span in spans) else None
        for layer, some_keys, some_values in zip(self._layers_of(batch), keys, values, strict=True):
            if gather:
                gather(some_keys, some_values, layer.keys, layer.values, blocks, counts)
            else:
                for page, rows in _in_blocks(spans, layer, some_keys, some_values):
                    rows.copy_(page)

    def _layers_of(self, batch: Batch) -> tuple[Planes, ...]:
        return self._layers[batch.first_layer : batch.first_layer + batch.n_layers]

    def _staged(self, memory: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch's keys and values in staging, as ``[layers, tokens, heads, width]``."""
        layout = self._layout
        n_keys, n_values = (batch.n_tokens * layout.kv_heads * width for width in (layout.key_dim, layout.value_dim))
        items = memory.view(torch_type(layout.dtype))[: batch.n_layers * (n_keys + n_values)]
        keys, values = items.view(batch.n_layers, n_keys + n_values).split_with_sizes([n_keys, n_values], 1)
        shape = batch.n_tokens, layout.kv_heads
        return keys.unflatten(1, (*shape, layout.key_dim)), values.unflatten(1, (*shape, layout.value_dim))

    def _rotate(self, keys: torch.Tensor, old: torch.Tensor, new: torch.Tensor, batch: Batch) -> None:
        """Rotate the keys in staging, in float32: layers that follow each other and rotate alike at once."""
        angles: dict[int, Angles] = {}
        rotations = [layer.rotation for layer in self._layers_of(batch)]
        end = 0
        for _, alike in itertools.groupby(rotations, lambda turn: turn and (id(turn.cos_sin), turn.neox, turn.offset)):
            group = list(alike)
            start, end = end, end + len(group)
            rotation = group[0]
            if rotation is None:
                continue
            table = rotation.cos_sin
            if id(table) not in angles:
                angles[id(table)] = angles_between(table.index_select(0, old), table.index_select(0, new))
            cos, sin = angles[id(table)]
            part = keys[start:end, ..., rotation.offset : rotation.offset + table.shape[1]]
            first, second = pairs_of(part, rotation.neox)
            # Views of the keys themselves if these are float32, so nothing is written before all is computed.
            one, other = first.float(), second.float()
            one, other = one * cos - other * sin, other * cos + one * sin
            first.copy_(one)
            second.copy_(other)


def _in_blocks(
    spans: Sequence[BlockSpan], layer: Planes, keys: torch.Tensor, values: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each block span in the pages, and its rows in staging; all as integers.

    Each copy writes one view of a block. An index over the whole plane would, where the pages are not contiguous,
    have torch_npu copy all pages to a temporary and back, over what other requests wrote meanwhile.
    """
    for plane, rows in ((layer.keys, keys), (layer.values, values)):
        if not rows.shape[-1]:
            continue
        pages, staged, at = as_bits(plane), as_bits(rows), 0
        for block, slot, count in spans:
            yield pages[block, slot : slot + count], staged[at : at + count]
            at += count
