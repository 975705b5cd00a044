"""A device in one file, in plain torch: an index picks tokens from views of the pages, which are alike in every format.

Copies are made before a call returns, so there is nothing to wait for.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import ArenaProgress, Device, PagedLayer, PageSegment, Rotation, Segment, Transfer
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.devices import read_pages, torch_type

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Numbers are copied as integers of their size, so that every bit of them is."""


class Plane(NamedTuple):
    """The keys or the values of a layer."""

    pages: torch.Tensor
    """``[blocks, tokens, heads, width]``, as bits."""
    part: int
    """The place in a shard at which the rows begin."""
    rotation: Rotation | None


class Group(NamedTuple):
    """A group of layers."""

    planes: Sequence[Plane]
    block_size: int
    layout: KVLayout


class Finished(Transfer):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class PlainDevice(Device):
    formats = tuple(one for one in Device.formats if one != "packed_tiles")
    """Tiles are the one format of which there is no view of a token's items."""
    block_tokens = 16

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self._arena = np.empty(0, np.uint8)

    def _attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        pages = read_pages(layers, block_size, layout)
        if pages.place.type != self.torch_type:
            raise Unsupported(
                f"the pages lie on {pages.place}, but device 'plain' serves only a CPU's; choose another device"
            )
        planes: list[Plane] = []
        for index, layer in enumerate(pages.layers):
            keys, values = (plane.transpose(1, 2).view(BITS[plane.itemsize]) for plane in (layer.keys, layer.values))
            planes.append(Plane(keys, layout.keys_at(index), layer.rotation))
            planes.append(Plane(values, layout.values_at(index), None))
        self._groups.append(Group(planes, block_size, layout))

    def _pin(self, arena: npt.NDArray[np.uint8], progress: Callable[[], ArenaProgress] | None) -> None:
        self._arena = arena

    def _load(
        self, segments: Sequence[Segment | PageSegment], block_ids: npt.NDArray[np.int64], group: int
    ) -> Transfer:
        planes, block_size, layout = self._groups[group]
        dtype = torch_type(layout.dtype)
        for segment in segments:
            new = torch.arange(segment.span.start, segment.span.end)
            old = new + segment.source_start - segment.span.start
            at = _places(segment.span.start, len(new), block_ids, block_size)
            for plane in planes:
                if isinstance(segment, PageSegment):
                    rows = plane.pages[_places(segment.row, len(new), segment.blocks, block_size)]
                else:
                    rows = self._stored(segment, plane)
                if plane.rotation and segment.source_start != segment.span.start:
                    rows = _rotated(rows.view(dtype), plane.rotation, old, new).view(rows.dtype)
                plane.pages[at] = rows
        return Finished()

    def _save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], group: int) -> Transfer:
        planes, block_size, _ = self._groups[group]
        for segment in segments:
            at = _places(segment.span.start, len(segment.span), block_ids, block_size)
            for plane in planes:
                self._stored(segment, plane).copy_(plane.pages[at])
        return Finished()

    def _close(self) -> None:
        self._groups, self._arena = [], np.empty(0, np.uint8)

    def _stored(self, segment: Segment, plane: Plane) -> torch.Tensor:
        """A segment's rows in the arena, ``[tokens, heads, width]``."""
        _, _, heads, width = plane.pages.shape
        row_bytes = heads * width * plane.pages.itemsize
        start = segment.shard + plane.part + segment.row * row_bytes
        rows = torch.from_numpy(self._arena[start : start + len(segment.span) * row_bytes])
        return rows.view(plane.pages.dtype).view(len(segment.span), heads, width)


def _places(start: int, n_tokens: int, blocks: npt.NDArray[np.int64], block_size: int) -> tuple[torch.Tensor, ...]:
    """The blocks and slots of tokens from ``start`` on, where ``blocks`` have all from 0 on."""
    numbers, slots = np.divmod(np.arange(start, start + n_tokens), block_size)
    return torch.from_numpy(blocks[numbers]), torch.from_numpy(slots)


def _rotated(keys: torch.Tensor, rotation: Rotation, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A copy of keys ``[tokens, heads, width]``, rotated from their old positions to new ones."""
    cos_old, sin_old = rotation.cos_sin[old].chunk(2, dim=-1)
    cos_new, sin_new = rotation.cos_sin[new].chunk(2, dim=-1)
    scale = cos_old * cos_old + sin_old * sin_old
    cos = ((cos_new * cos_old + sin_new * sin_old) / scale).unsqueeze(1)
    sin = ((sin_new * cos_old - cos_new * sin_old) / scale).unsqueeze(1)
    rotated_part = slice(rotation.offset, rotation.offset + rotation.cos_sin.shape[1])
    numbers = keys[..., rotated_part].float()
    one, other = numbers.chunk(2, dim=-1) if rotation.neox else (numbers[..., ::2], numbers[..., 1::2])
    pairs = one * cos - other * sin, other * cos + one * sin
    numbers = torch.cat(pairs, -1) if rotation.neox else torch.stack(pairs, -1).flatten(-2)
    if keys.itemsize == 1:
        largest = torch.finfo(keys.dtype).max
        numbers = numbers.clamp(-largest, largest)
    result = keys.clone()
    result[..., rotated_part] = numbers.to(keys.dtype)
    return result
