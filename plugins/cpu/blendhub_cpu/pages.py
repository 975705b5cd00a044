"""The engine's pages as planes: for every format, four strides give the address of a token's key or value."""

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import PagedLayer, PageFormat
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.devices import check_pages, count_blocks, count_positions, planes_of
from blendhub_cpu.kernels import NONE, PLANE_RECORD, ROTATION_RECORD


class Pages(NamedTuple):
    """All layers' pages as tables for the kernels."""

    planes: npt.NDArray[Any]
    rotations: npt.NDArray[Any]
    n_blocks: int
    n_positions: int | None
    """The positions that every rotation table covers; None: no layer has a rotation."""
    keep_alive: tuple[object, ...]
    """The tensors that the addresses point to."""


def read_pages(layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> Pages:
    """Check the layers against the layout, and make the kernels' tables."""
    place = check_pages(layers, block_size, layout, get_args(PageFormat))
    if place.type != "cpu":
        raise Unsupported(
            f"the pages lie on {place}, but device 'cpu' supports only pages in host memory; choose another device"
        )
    rotations = _Rotations(layout)
    records: list[tuple[int, ...]] = []
    for index, layer in enumerate(layers):
        keys, values = planes_of(layer, block_size, layout)
        records.append(
            _plane_record(
                keys,
                transposed=layer.format == "packed_transposed",
                shard_offset=layout.keys_at(index),
                row_bytes=layout.key_row_bytes,
                rotation=rotations.index_of(layer),
            )
        )
        if layout.value_dim:
            records.append(
                _plane_record(
                    values,
                    transposed=False,
                    shard_offset=layout.values_at(index),
                    row_bytes=layout.value_row_bytes,
                    rotation=NONE,
                )
            )
    records.sort(key=lambda record: record[-1])  # by rotation: its angles are then computed once for each block span
    return Pages(
        np.array(records, PLANE_RECORD),
        np.array(rotations.records, ROTATION_RECORD),
        count_blocks(layers),
        count_positions(layers),
        (tuple(layers), tuple(rotations.tables)),
    )


def _plane_record(
    plane: torch.Tensor, *, transposed: bool, shard_offset: int, row_bytes: int, rotation: int
) -> tuple[int, ...]:
    _, heads, _, width = plane.shape
    block_stride, head_stride, token_stride, item_stride = (stride * plane.itemsize for stride in plane.stride())
    if head_stride == width * plane.itemsize and not transposed:
        heads, width = 1, heads * width
    return (
        plane.data_ptr(),
        block_stride,
        head_stride,
        token_stride,
        heads,
        width,
        item_stride if transposed else 0,
        shard_offset,
        row_bytes,
        rotation,
    )


class _Rotations:
    """The distinct rotations of all layers; most models have one, whose angles are then computed once."""

    def __init__(self, layout: KVLayout) -> None:
        self.records: list[tuple[int, ...]] = []
        self.tables: list[torch.Tensor] = []
        self._layout = layout
        self._known: dict[tuple[object, ...], int] = {}

    def index_of(self, layer: PagedLayer) -> int:
        """The index of a layer's rotation in ``records``; adds it if it is new."""
        rotation = layer.rotation
        if rotation is None:
            return NONE
        table = rotation.cos_sin
        same = (table.data_ptr(), table.shape, table.stride(), rotation.neox, rotation.offset)
        if same not in self._known:
            table = table.contiguous()
            self._known[same] = len(self.records)
            self.tables.append(table)
            layout = self._layout
            self.records.append(
                (
                    table.data_ptr(),
                    table.shape[1] // 2,
                    rotation.neox,
                    rotation.offset,
                    layout.kv_heads,
                    layout.key_dim,
                )
            )
        return self._known[same]
