"""The engine's pages as planes: whatever their format, three strides say where a token's key or value lies."""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import PagedLayer, PageFormat
from blendhub.devices import check_pages, count_blocks, count_positions, planes_of
from blendhub.layout import ITEM_SIZES, KVLayout
from blendhub_cuda.records import ADDRESS, BLOCK_STRIDE, PLANE_WORDS, TABLE, TOKEN_STRIDE

FORMATS: tuple[PageFormat, ...] = ("packed_heads", "packed_tokens", "kv_first", "split", "latent")
"""What is served. ``packed_transposed`` is a CPU's alone."""

ACCESS_BYTES = 16
"""What one thread reads or writes at once, at most."""


class Pages(NamedTuple):
    """All layers' pages, as kernels see them."""

    planes: npt.NDArray[np.int64]
    """[layers, kinds, words]: of each layer its keys, and its values if it has any."""
    n_blocks: int
    n_positions: int | None
    """How many positions all rotations know; None: no layer turns its keys."""
    widest_half: int
    """The most pairs of numbers that a rotation turns; 0: none does."""
    align: int
    """Bytes that the places of all vectors are multiples of, in pages and from row to row of a shard."""
    turn_align: int
    """The same of the parts that turn."""
    table_align: int
    """The same of the rows of ``cos_sin``."""
    keep: tuple[object, ...]
    """What the addresses lead to."""


def read_pages(layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> Pages:
    """Check the layers against the layout, and describe them to kernels."""
    check_pages(layers, block_size, layout, FORMATS)
    item = ITEM_SIZES[layout.dtype]
    planes = np.zeros((len(layers), 2 if layout.value_dim else 1, PLANE_WORDS), np.int64)
    tables: dict[int, torch.Tensor] = {}
    turned, table_align = [], ACCESS_BYTES
    for index, layer in enumerate(layers):
        parts = (layout.keys_at(index), layout.values_at(index))
        for record, plane, part in zip(planes[index], planes_of(layer, block_size, layout), parts, strict=False):
            row_items = layout.kv_heads * plane.shape[-1]
            record[:TABLE] = plane.data_ptr(), *plane.stride()[:3], part, row_items
        if layer.rotation is not None:
            # Layers that share a table go on sharing it if it must be copied.
            table = tables.setdefault(id(layer.rotation.cos_sin), layer.rotation.cos_sin.contiguous())
            half = table.shape[1] // 2
            planes[index, 0, TABLE:] = table.data_ptr(), half, layer.rotation.neox, layer.rotation.offset
            turned += [half * item, layer.rotation.offset * item]
            table_align = gcd(table_align, table.data_ptr(), 4 * half)
    strides = planes[..., BLOCK_STRIDE : TOKEN_STRIDE + 1] * item
    align = gcd(ACCESS_BYTES, *planes[..., ADDRESS].flat, *strides.flat, layout.key_dim * item, layout.value_dim * item)
    return Pages(
        planes,
        count_blocks(layers),
        count_positions(layers),
        max((table.shape[1] // 2 for table in tables.values()), default=0),
        align,
        gcd(align, *turned),
        table_align,
        (tuple(layers), tuple(tables.values())),
    )
