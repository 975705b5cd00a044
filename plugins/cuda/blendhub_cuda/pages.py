"""The engine's pages as planes: for every format, three strides give the address of a token's key or value."""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import PagedLayer, PageFormat
from blendhub.core.layout import ITEM_SIZES, KVLayout
from blendhub.devices import check_pages, count_blocks, count_positions, planes_of
from blendhub_cuda.records import ADDRESS, BLOCK_STRIDE, PLANE_WORDS, TABLE, TOKEN_STRIDE

FORMATS: tuple[PageFormat, ...] = ("packed_heads", "packed_tokens", "kv_first", "split", "latent")
"""The supported formats; only CPU backends use ``packed_transposed``."""

ACCESS_BYTES = 16
"""The widest access of one thread."""


class Pages(NamedTuple):
    """All layers' pages as tables for the kernels."""

    planes: npt.NDArray[np.int64]
    """[layers, kinds, words]: each layer's keys, and its values if it has any."""
    n_blocks: int
    n_positions: int | None
    """The positions that every rotation table covers; None: no layer has a rotation."""
    widest_half: int
    """The most pairs of items of a rotation; 0: no layer has one."""
    align: int
    """The alignment in bytes of all vectors, in pages and from row to row of a shard."""
    rotated_align: int
    """The alignment of the rotated parts of keys."""
    table_align: int
    """The alignment of the rows of ``cos_sin``."""
    place: torch.device
    keep_alive: tuple[object, ...]
    """The tensors that the addresses point to."""


def read_pages(layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> Pages:
    """Check the layers against the layout, and make the kernels' tables."""
    place = check_pages(layers, block_size, layout, FORMATS)
    item = ITEM_SIZES[layout.dtype]
    planes = np.zeros((len(layers), 2 if layout.value_dim else 1, PLANE_WORDS), np.int64)
    tables: dict[int, torch.Tensor] = {}
    rotated, table_align = [], ACCESS_BYTES
    for index, layer in enumerate(layers):
        both = planes_of(layer, block_size, layout)
        offsets = (layout.keys_at(index), layout.values_at(index))
        for record, plane, shard_offset in zip(planes[index], both, offsets, strict=False):
            row_items = layout.kv_heads * plane.shape[-1]
            record[:TABLE] = plane.data_ptr(), *plane.stride()[:3], shard_offset, row_items
        if layer.rotation is not None:
            # Layers that share a table also share its contiguous copy.
            table = tables.setdefault(id(layer.rotation.cos_sin), layer.rotation.cos_sin.contiguous())
            half = table.shape[1] // 2
            planes[index, 0, TABLE:] = table.data_ptr(), half, layer.rotation.neox, layer.rotation.offset
            rotated += [half * item, layer.rotation.offset * item]
            table_align = gcd(table_align, table.data_ptr(), 4 * half)
    strides = planes[..., BLOCK_STRIDE : TOKEN_STRIDE + 1] * item
    align = gcd(ACCESS_BYTES, *planes[..., ADDRESS].flat, *strides.flat, layout.key_dim * item, layout.value_dim * item)
    return Pages(
        planes,
        count_blocks(layers),
        count_positions(layers),
        max((table.shape[1] // 2 for table in tables.values()), default=0),
        align,
        gcd(align, *rotated),
        table_align,
        place,
        (tuple(layers), tuple(tables.values())),
    )
