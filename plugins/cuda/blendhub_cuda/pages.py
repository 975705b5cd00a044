"""The engine's pages as planes: whatever their format, three strides say where a token's key or value lies."""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import PagedLayer, Rotation
from blendhub.errors import LayoutMismatch, Unsupported
from blendhub.layout import ITEM_SIZES, KVLayout
from blendhub_cuda.records import ADDRESS, BLOCK_STRIDE, PLANE_WORDS, TABLE, TOKEN_STRIDE

TENSOR_TYPES = {
    "float32": (torch.float32,),
    "float16": (torch.float16,),
    "bfloat16": (torch.bfloat16,),
    "float8_e4m3": (torch.float8_e4m3fn, torch.uint8),
    "float8_e5m2": (torch.float8_e5m2, torch.uint8),
    "int8": (torch.int8, torch.uint8),
}
"""What tensors of a layout's dtype may be; engines keep 8-bit floats in tensors of bytes too."""

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
    if len(layers) != layout.layers:
        raise LayoutMismatch(f"{len(layers)} layers were given, but the layout has {layout.layers}")
    if block_size < 1:
        raise LayoutMismatch(f"a block has 1 token or more, got block_size {block_size}")
    for layer in layers:
        _check_tensors(layer, block_size, layout, layers[0].tensors[0].device)
    item = ITEM_SIZES[layout.dtype]
    planes = np.zeros((len(layers), 2 if layout.value_dim else 1, PLANE_WORDS), np.int64)
    tables: dict[int, torch.Tensor] = {}
    turned, table_align = [], ACCESS_BYTES
    for index, layer in enumerate(layers):
        parts = (layout.keys_at(index), layout.values_at(index))
        for kind, (plane, part) in enumerate(zip(_planes(layer, layout), parts, strict=False)):
            row_items = layout.kv_heads * plane.shape[-1]
            planes[index, kind, :TABLE] = plane.data_ptr(), *plane.stride()[:3], part, row_items
        if layer.rotation is not None:
            _check_rotation(layer, layer.rotation, layout)
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
        min(tensor.shape[layer.format == "kv_first"] for layer in layers for tensor in layer.tensors),
        min((len(table) for table in tables.values()), default=None),
        max((table.shape[1] // 2 for table in tables.values()), default=0),
        align,
        gcd(align, *turned),
        table_align,
        (tuple(layers), tuple(tables.values())),
    )


def _shapes(layer: PagedLayer, block_size: int, layout: KVLayout) -> list[tuple[int | None, ...]]:
    """What shapes the tensors of a layer must have; None stands for the number of blocks."""
    heads, keys, values = layout.kv_heads, layout.key_dim, layout.value_dim
    match layer.format:
        case "packed_heads":
            return [(None, heads, block_size, keys + values)]
        case "packed_tokens":
            return [(None, block_size, heads, keys + values)]
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
    raise Unsupported(
        f"layer {layer.name!r} has pages of format {layer.format!r}, which device 'cuda' does not serve; it serves "
        "packed_heads, packed_tokens, kv_first, split and latent"
    )


def _check_tensors(layer: PagedLayer, block_size: int, layout: KVLayout, device: torch.device) -> None:
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
        if tensor.device != device:
            raise Unsupported(f"layer {layer.name!r} has its pages on {tensor.device}, but others lie on {device}")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise Unsupported(f"layer {layer.name!r} has pages of strides {tensor.stride()}; the last one must be 1")


def _check_rotation(layer: PagedLayer, rotation: Rotation, layout: KVLayout) -> None:
    table, device = rotation.cos_sin, layer.tensors[0].device
    if layout.dtype == "int8":
        raise Unsupported(
            f"layer {layer.name!r} keeps keys as int8, whose scales are not known, so they cannot be turned; "
            "attach it without a rotation, and load it only at the positions it was saved at"
        )
    if table.dtype != torch.float32 or table.device != device:
        raise Unsupported(
            f"layer {layer.name!r} has cos_sin of {table.dtype} on {table.device}; it must be float32 on {device}"
        )
    width = table.shape[1] if table.ndim == 2 else 0
    if width < 2 or width % 2 or not 0 <= rotation.offset <= layout.key_dim - width:
        raise LayoutMismatch(
            f"layer {layer.name!r} turns its keys from {rotation.offset} on by cos_sin of shape "
            f"{list(table.shape)}; it must be [positions, width], width even, within keys of {layout.key_dim}"
        )


def _planes(layer: PagedLayer, layout: KVLayout) -> list[torch.Tensor]:
    """Views of a layer's keys and of its values as [blocks, heads, tokens, width], without a copy."""
    widths = [layout.key_dim, layout.value_dim]
    match layer.format:
        case "packed_heads":
            return list(layer.tensors[0].split(widths, -1))
        case "packed_tokens":
            return list(layer.tensors[0].transpose(1, 2).split(widths, -1))
        case "latent":
            return [layer.tensors[0].unsqueeze(1)]
        case "kv_first":
            return list(layer.tensors[0].transpose(2, 3))
        case _:
            return [tensor.transpose(1, 2) for tensor in layer.tensors]
