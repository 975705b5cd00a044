"""The pages of an engine's attention layers, as a device is given them, and whether they are what a layout says."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from blendhub.core.errors import LayoutMismatch, Unsupported
from blendhub.core.layout import KVLayout

if TYPE_CHECKING:
    import torch

PageFormat = Literal["packed_heads", "packed_transposed", "packed_tiles", "split", "latent"]
"""The memory layout of one layer's pages. B blocks, H heads, T tokens a block, Dk and Dv the widths of key and value:

=================  ==========================================================================================
packed_heads       one tensor [B, H, T, Dk + Dv]; the last axis has the key first, then the value
packed_transposed  one tensor [B, H, T * (Dk + Dv)]: the block's keys as [Dk, T], then its values as [T, Dv]
packed_tiles       one tensor [B, H, T * (Dk + Dv)]: the block's keys as [T / 16, Dk / 2, 16, 2], then its values as
                   [Dv / 16, T / 2, 16, 2]: keys have 16 tokens by pairs of items, values 16 items by pairs of tokens
split              two tensors, keys [B, T, H, Dk] and values [B, T, H, Dv]
latent             one tensor [B, T, L]: one vector for each token, which is both key and value (MLA)
=================  ==========================================================================================

Tensors may have any strides, such as those of views of a larger allocation; the last axis is contiguous. 8-bit items
may be in tensors of bytes.
"""


class Rotation(msgspec.Struct, frozen=True, eq=False):
    """The rotary embedding of a layer's keys."""

    cos_sin: "torch.Tensor"
    """float32 ``[positions, width]``: cosines of ``width // 2`` angles, then their sines, with the model's scale.
    It may be a view of a wider table."""
    neox: bool
    """True: items of the first half of the rotated part are paired with those of the second; False: neighbours are."""
    offset: int = 0
    """The first item of the rotated part of a key; items outside it are not rotated. MLA rotates the last part."""


class PagedLayer(msgspec.Struct, frozen=True, eq=False):
    """The pages of one attention layer, as the engine allocated them."""

    name: str
    format: PageFormat
    tensors: tuple["torch.Tensor", ...]
    rotation: Rotation | None = None
    """None: the keys of this layer do not depend on their position."""


TILE = 16
"""The rows of a tile, as CPUs with AMX multiply them: of tokens in keys, of items in values."""

TENSOR_TYPES = {
    "float32": ("float32",),
    "float16": ("float16",),
    "bfloat16": ("bfloat16",),
    "float8_e4m3": ("float8_e4m3fn", "uint8"),
    "float8_e5m2": ("float8_e5m2", "uint8"),
    "int8": ("int8", "uint8"),
}
"""torch's names of the dtypes that pages of each layout dtype have: the first one's items, or bytes of them."""


def check_pages(layers: Sequence[PagedLayer], block_size: int, layout: KVLayout, formats: Sequence[PageFormat]) -> None:
    """Raise LayoutMismatch or Unsupported unless the layers fit the layout, in one of these formats."""
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
        actual = tuple(tensor.shape)
        if len(actual) != len(shape) or not all(
            required in (None, size) for required, size in zip(shape, actual, strict=True)
        ):
            required_shape = ", ".join("blocks" if size is None else str(size) for size in shape)
            raise LayoutMismatch(
                f"layer {layer.name!r} has pages of shape {list(actual)}, but as {layer.format!r} in blocks of "
                f"{block_size} tokens its layout asks for [{required_shape}]"
            )
        if str(tensor.dtype).removeprefix("torch.") not in TENSOR_TYPES[layout.dtype]:
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
    if str(table.dtype) != "torch.float32":
        raise Unsupported(f"layer {layer.name!r} has cos_sin of {table.dtype}; it must be float32")
    width = table.shape[1] if table.ndim == 2 else 0
    if width < 2 or width % 2 or not 0 <= rotation.offset <= layout.key_dim - width:
        raise LayoutMismatch(
            f"layer {layer.name!r} rotates its keys from item {rotation.offset} on by cos_sin of shape "
            f"{list(table.shape)}; it must be [positions, width], width even, within keys of {layout.key_dim}"
        )
