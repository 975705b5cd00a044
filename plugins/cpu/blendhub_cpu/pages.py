"""The engine's pages as planes: whatever their format, four strides say where a token's key or value lies."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import PagedLayer, Rotation
from blendhub.errors import LayoutMismatch, Unsupported
from blendhub.layout import KVLayout
from blendhub_cpu.kernels import NONE, PLANE_RECORD, ROTATION_RECORD

TENSOR_TYPES = {
    "float32": (torch.float32,),
    "float16": (torch.float16,),
    "bfloat16": (torch.bfloat16,),
    "float8_e4m3": (torch.float8_e4m3fn, torch.uint8),
    "float8_e5m2": (torch.float8_e5m2, torch.uint8),
    "int8": (torch.int8, torch.uint8),
}
"""What tensors of a layout's dtype may be; engines keep 8-bit floats in tensors of bytes too."""


class Pages(NamedTuple):
    """All layers' pages, as kernels see them."""

    planes: npt.NDArray[Any]
    rotations: npt.NDArray[Any]
    n_blocks: int
    n_positions: int | None
    """How many positions all rotations know; None: no layer turns its keys."""
    keep: tuple[object, ...]
    """What the addresses lead to."""


def read_pages(layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> Pages:
    """Check the layers against the layout, and describe them to kernels."""
    if len(layers) != layout.layers:
        raise LayoutMismatch(f"{len(layers)} layers were given, but the layout has {layout.layers}")
    if block_size < 1:
        raise LayoutMismatch(f"a block has 1 token or more, got block_size {block_size}")
    for layer in layers:
        _check_tensors(layer, block_size, layout)
    rotations = _Rotations(layout)
    records: list[tuple[int, ...]] = []
    for index, layer in enumerate(layers):
        keys, values = _planes(layer, block_size, layout)
        records.append(
            _plane_record(
                keys,
                transposed=layer.format == "packed_transposed",
                part=layout.keys_at(index),
                row_bytes=layout.key_row_bytes,
                rotation=rotations.index_of(layer),
            )
        )
        if layout.value_dim:
            records.append(
                _plane_record(
                    values,
                    transposed=False,
                    part=layout.values_at(index),
                    row_bytes=layout.value_row_bytes,
                    rotation=NONE,
                )
            )
    records.sort(key=lambda record: record[-1])  # so that the angles of a rotation are computed once a piece
    return Pages(
        np.array(records, PLANE_RECORD),
        np.array(rotations.records, ROTATION_RECORD),
        min(tensor.shape[layer.format == "kv_first"] for layer in layers for tensor in layer.tensors),
        min((len(table) for table in rotations.tables), default=None),
        (tuple(layers), tuple(rotations.tables)),
    )


def _shapes(layer: PagedLayer, block_size: int, layout: KVLayout) -> list[tuple[int | None, ...]]:
    """What shapes the tensors of a layer must have; None stands for the number of blocks."""
    heads, keys, values = layout.kv_heads, layout.key_dim, layout.value_dim
    match layer.format:
        case "packed_heads":
            return [(None, heads, block_size, keys + values)]
        case "packed_tokens":
            return [(None, block_size, heads, keys + values)]
        case "packed_transposed":
            return [(None, heads, block_size * (keys + values))]
        case "split":
            return [(None, block_size, heads, keys), (None, block_size, heads, values)]
        case "kv_first" if keys == values:
            return [(2, None, block_size, heads, keys)]
        case "latent" if heads == 1 and values == 0:
            return [(None, block_size, keys)]
        case "kv_first" | "latent":
            raise LayoutMismatch(
                f"layer {layer.name!r} has pages of format {layer.format!r}, which cannot be with {heads} heads, "
                f"keys of {keys} and values of {values} numbers; the layout must be the one of the engine's pages"
            )
    raise Unsupported(f"layer {layer.name!r} has pages of the unknown format {layer.format!r}; see PageFormat")


def _check_tensors(layer: PagedLayer, block_size: int, layout: KVLayout) -> None:
    shapes = _shapes(layer, block_size, layout)
    if len(layer.tensors) != len(shapes):
        raise LayoutMismatch(
            f"layer {layer.name!r} has {len(layer.tensors)} tensors, but its format {layer.format!r} has {len(shapes)}"
        )
    for tensor, shape in zip(layer.tensors, shapes, strict=True):
        given = tuple(tensor.shape)
        if len(given) != len(shape) or not all(
            wanted in (None, found) for wanted, found in zip(shape, given, strict=True)
        ):
            wanted_shape = ", ".join("blocks" if wanted is None else str(wanted) for wanted in shape)
            raise LayoutMismatch(
                f"layer {layer.name!r} has pages of shape {list(given)}, but as {layer.format!r} in blocks of "
                f"{block_size} tokens its layout asks for [{wanted_shape}]"
            )
        if tensor.dtype not in TENSOR_TYPES[layout.dtype]:
            raise LayoutMismatch(f"layer {layer.name!r} has pages of {tensor.dtype}, but its layout is {layout.dtype}")
        if tensor.device.type != "cpu":
            raise Unsupported(f"layer {layer.name!r} has its pages on {tensor.device}; device 'cpu' serves only cpu")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise Unsupported(f"layer {layer.name!r} has pages of strides {tensor.stride()}; the last one must be 1")


def _planes(layer: PagedLayer, block_size: int, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a layer's keys and of its values as [blocks, heads, tokens, width], without a copy."""
    widths = [layout.key_dim, layout.value_dim]
    first, last = layer.tensors[0], layer.tensors[-1]
    match layer.format:
        case "packed_heads":
            keys, values = first.split(widths, -1)
        case "packed_tokens":
            keys, values = first.transpose(1, 2).split(widths, -1)
        case "packed_transposed":
            keys, values = first.split([block_size * width for width in widths], -1)
            keys = keys.unflatten(-1, (widths[0], block_size)).transpose(2, 3)
            values = values.unflatten(-1, (block_size, widths[1]))
        case "kv_first":
            keys, values = first.transpose(2, 3)
        case "split":
            keys, values = first.transpose(1, 2), last.transpose(1, 2)
        case "latent":
            keys = values = first.unsqueeze(1)
    return keys, values


def _plane_record(
    plane: torch.Tensor, *, transposed: bool, part: int, row_bytes: int, rotation: int
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
        part,
        row_bytes,
        rotation,
    )


class _Rotations:
    """The different rotations of all layers; most models have one, and its angles are then computed once."""

    def __init__(self, layout: KVLayout) -> None:
        self.records: list[tuple[int, ...]] = []
        self.tables: list[torch.Tensor] = []
        self._layout = layout
        self._known: dict[tuple[object, ...], int] = {}

    def index_of(self, layer: PagedLayer) -> int:
        """The index of a layer's rotation in the records, to which it is added if it is new."""
        rotation = layer.rotation
        if rotation is None:
            return NONE
        self._check(layer, rotation)
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

    def _check(self, layer: PagedLayer, rotation: Rotation) -> None:
        layout, table = self._layout, rotation.cos_sin
        if layout.dtype == "int8":
            raise Unsupported(
                f"layer {layer.name!r} keeps keys as int8, whose scales are not known, so they cannot be turned; "
                "attach it without a rotation, and load it only at the positions it was saved at"
            )
        if table.dtype != torch.float32 or table.device.type != "cpu":
            raise Unsupported(
                f"layer {layer.name!r} has cos_sin of {table.dtype} on {table.device}; it must be float32 on cpu"
            )
        width = table.shape[1] if table.ndim == 2 else 0
        if width < 2 or width % 2 or not 0 <= rotation.offset <= layout.key_dim - width:
            raise LayoutMismatch(
                f"layer {layer.name!r} turns its keys from {rotation.offset} on by cos_sin of shape "
                f"{list(table.shape)}; it must be [positions, width], width even, within keys of {layout.key_dim}"
            )
