"""Checks of an engine's pages, and uniform views of every page format."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from blendhub.contracts import PagedLayer, PageFormat, Rotation
from blendhub.core.errors import LayoutMismatch, Unsupported
from blendhub.core.layout import KVLayout

TENSOR_TYPES = {
    "float32": (torch.float32,),
    "float16": (torch.float16,),
    "bfloat16": (torch.bfloat16,),
    "float8_e4m3": (torch.float8_e4m3fn, torch.uint8),
    "float8_e5m2": (torch.float8_e5m2, torch.uint8),
    "int8": (torch.int8, torch.uint8),
}
"""The torch dtypes of each layout dtype. Engines also keep 8-bit items in tensors of bytes."""


TILE = 16
"""The rows of a tile, as CPUs with AMX multiply them: of tokens in keys, of items in values."""


class Planes(NamedTuple):
    """The pages of one layer, as views ``[blocks, heads, tokens, width]``.

    In tiles, tokens and width have two axes each: ``[blocks, heads, tokens / n, n, width / m, m]``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    """The values; of width 0 if one vector is both key and value."""
    rotation: Rotation | None


class Pages(NamedTuple):
    layers: tuple[Planes, ...]
    n_blocks: int
    """The number of blocks that every layer has."""
    n_positions: int | None
    """The positions that every rotation table covers; None: no layer has a rotation."""
    place: torch.device


def read_pages(layers: Sequence[PagedLayer], block_size: int, layout: KVLayout, formats: Sequence[PageFormat]) -> Pages:
    """Uniform views of the layers. Raises LayoutMismatch or Unsupported unless the layers fit the layout."""
    if len(layers) != layout.layers:
        raise LayoutMismatch(f"{len(layers)} layers were given, but the layout has {layout.layers}")
    if block_size < 1:
        raise LayoutMismatch(f"a block has 1 token or more, got block_size {block_size}")
    for layer in layers:
        if layer.format not in formats:
            raise Unsupported(
                f"layer {layer.name!r} has pages of format {layer.format!r}, which this device does not support; "
                f"it supports {', '.join(formats)}"
            )
        _check_tensors(layer, block_size, layout)
        if layer.rotation is not None:
            _check_rotation(layer, layer.rotation, layout)
    tables = [layer.rotation.cos_sin for layer in layers if layer.rotation]
    places = {tensor.device for tensor in [*tables, *(tensor for layer in layers for tensor in layer.tensors)]}
    if len(places) > 1:
        raise Unsupported(
            f"pages and cos_sin lie on {', '.join(sorted(map(str, places)))}; they must lie on one device"
        )
    # Layers that share a table also share its contiguous copy.
    contiguous = {id(table): table.contiguous() for table in tables}
    planes = []
    for layer in layers:
        rotation = layer.rotation
        if rotation is not None:
            rotation = Rotation(contiguous[id(rotation.cos_sin)], rotation.neox, rotation.offset)
        planes.append(Planes(*planes_of(layer, block_size, layout), rotation))
    n_blocks = min(tensor.shape[0] for layer in layers for tensor in layer.tensors)
    return Pages(tuple(planes), n_blocks, min(map(len, tables), default=None), places.pop())


def planes_of(layer: PagedLayer, block_size: int, layout: KVLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a layer's keys and of its values as in :class:`Planes`, without a copy."""
    widths = [layout.key_dim, layout.value_dim]
    first, last = layer.tensors[0], layer.tensors[-1]
    match layer.format:
        case "packed_heads":
            keys, values = first.split_with_sizes(widths, -1)
        case "packed_transposed":
            keys, values = first.split_with_sizes([block_size * width for width in widths], -1)
            keys = keys.view(*keys.shape[:2], widths[0], block_size).transpose(2, 3)
            values = values.view(*values.shape[:2], block_size, widths[1])
        case "packed_tiles":
            keys, values = first.split_with_sizes([block_size * width for width in widths], -1)
            keys = keys.view(*keys.shape[:2], block_size // TILE, widths[0] // 2, TILE, 2).transpose(3, 4)
            values = values.view(*values.shape[:2], widths[1] // TILE, block_size // 2, TILE, 2)
            values = values.permute(0, 1, 3, 5, 2, 4)
        case "split":
            keys, values = first.transpose(1, 2), last.transpose(1, 2)
        case "latent":
            keys = first.unsqueeze(1)
            values = keys[..., widths[0] :]
    return keys, values


def rows_at(plane: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The rows ``[n, heads, width]`` of a plane's tokens, as a copy."""
    if plane.ndim == 4:
        return plane[blocks, :, slots]
    inner = plane.shape[3]
    return plane[blocks, :, slots // inner, slots % inner].flatten(-2)


def _shapes(layer: PagedLayer, block_size: int, layout: KVLayout) -> list[tuple[int | None, ...]]:
    """The required shapes of a layer's tensors; None stands for the number of blocks."""
    heads, keys, values = layout.kv_heads, layout.key_dim, layout.value_dim
    match layer.format:
        case "packed_heads":
            return [(None, heads, block_size, keys + values)]
        case "packed_transposed":
            return [(None, heads, block_size * (keys + values))]
        case "packed_tiles" if not (block_size % TILE or keys % 2 or values % TILE):
            return [(None, heads, block_size * (keys + values))]
        case "split":
            return [(None, block_size, heads, keys), (None, block_size, heads, values)]
        case "latent" if heads == 1 and values == 0:
            return [(None, block_size, keys)]
    raise LayoutMismatch(
        f"layer {layer.name!r} has pages of format {layer.format!r}, which is impossible with {heads} heads, "
        f"keys of {keys} and values of {values} items in blocks of {block_size} tokens; the layout must be that of the "
        "engine's pages"
    )


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
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise Unsupported(f"layer {layer.name!r} has pages of strides {tensor.stride()}; the last one must be 1")


def _check_rotation(layer: PagedLayer, rotation: Rotation, layout: KVLayout) -> None:
    table = rotation.cos_sin
    if layout.dtype == "int8":
        raise Unsupported(
            f"layer {layer.name!r} keeps keys as int8, whose scales are not known, so they cannot be rotated; "
            "attach it without a rotation, and load it only at the positions it was saved at"
        )
    if table.dtype != torch.float32:
        raise Unsupported(f"layer {layer.name!r} has cos_sin of {table.dtype}; it must be float32")
    width = table.shape[1] if table.ndim == 2 else 0
    if width < 2 or width % 2 or not 0 <= rotation.offset <= layout.key_dim - width:
        raise LayoutMismatch(
            f"layer {layer.name!r} rotates its keys from item {rotation.offset} on by cos_sin of shape "
            f"{list(table.shape)}; it must be [positions, width], width even, within keys of {layout.key_dim}"
        )
