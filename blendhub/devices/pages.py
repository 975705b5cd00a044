"""Uniform views of every page format."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from blendhub.contracts import PagedLayer, Rotation
from blendhub.contracts.pages import TENSOR_TYPES, TILE
from blendhub.core.layout import KVLayout


def torch_type(dtype: str) -> torch.dtype:
    """The torch dtype of a layout's."""
    kind = getattr(torch, TENSOR_TYPES[dtype][0])
    assert isinstance(kind, torch.dtype)
    return kind


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
    place: torch.device


def read_pages(layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> Pages:
    """Uniform views of layers that fit the layout."""
    # Layers that share a table also share its contiguous copy.
    tables = {id(layer.rotation.cos_sin): layer.rotation.cos_sin.contiguous() for layer in layers if layer.rotation}
    planes = []
    for layer in layers:
        rotation = layer.rotation
        if rotation is not None:
            rotation = Rotation(tables[id(rotation.cos_sin)], rotation.neox, rotation.offset)
        planes.append(Planes(*planes_of(layer, block_size, layout), rotation))
    n_blocks = min(tensor.shape[0] for layer in layers for tensor in layer.tensors)
    return Pages(tuple(planes), n_blocks, layers[0].tensors[0].device)


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
