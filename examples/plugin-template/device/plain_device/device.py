"""A device in one file, in plain torch: an index picks tokens from views of the pages, which are alike in every format.

Copies are made before a call returns, so there is nothing to wait for.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import ArenaProgress, Device, PagedLayer, Rotation, Segment, Transfer
from blendhub.core.errors import InvalidInput, Unsupported
from blendhub.core.layout import ITEM_SIZES, KVLayout
from blendhub.devices import Bounds, after_prefix, check_arena, check_chunks, check_writable, group_at, read_pages

TYPES = {name: getattr(torch, "float8_e4m3fn" if name == "float8_e4m3" else name) for name in ITEM_SIZES}
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
    bounds: Bounds


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
        self._arena: npt.NDArray[np.uint8] | None = None
        self._closed = False

    @torch.inference_mode(False)  # tensors that are made inside of it could not be written outside of it
    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        if self._closed:
            raise InvalidInput("this device is closed; create another one")
        if self._groups:
            check_chunks(layout, self._groups[0].layout)
        pages = read_pages(layers, block_size, layout, self.formats)
        if pages.place.type != self.torch_type:
            raise Unsupported(
                f"the pages lie on {pages.place}, but device 'plain' serves only a CPU's; choose another device"
            )
        planes: list[Plane] = []
        for index, layer in enumerate(pages.layers):
            keys, values = (plane.transpose(1, 2).view(BITS[plane.itemsize]) for plane in (layer.keys, layer.values))
            planes.append(Plane(keys, layout.keys_at(index), layer.rotation))
            planes.append(Plane(values, layout.values_at(index), None))
        self._groups.append(Group(planes, block_size, layout, Bounds(layout, block_size, pages)))

    def pin(self, arena: npt.NDArray[np.uint8], progress: Callable[[], ArenaProgress] | None = None) -> None:
        if self._closed:
            raise InvalidInput("this device is closed; create another one")
        check_arena(arena)
        self._arena = arena

    def load(
        self,
        segments: Sequence[Segment],
        block_ids: npt.NDArray[np.int64],
        skip_prefix_n_tokens: int = 0,
        group: int = 0,
    ) -> Transfer:
        arena, served = self._checked(segments, block_ids, group)
        served.bounds.check_load(segments, skip_prefix_n_tokens)
        for kept in after_prefix(segments, skip_prefix_n_tokens):
            new = torch.arange(kept.span.start, kept.span.end)
            old = new + kept.source_start - kept.span.start
            for plane, rows, at in _pairs(arena, served, kept, block_ids):
                if plane.rotation and kept.source_start != kept.span.start:
                    rows = _rotated(rows.view(TYPES[served.layout.dtype]), plane.rotation, old, new).view(rows.dtype)
                plane.pages[at] = rows
        return Finished()

    def save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], group: int = 0) -> Transfer:
        arena, served = self._checked(segments, block_ids, group)
        check_writable(arena)
        for segment in segments:
            for plane, rows, at in _pairs(arena, served, segment, block_ids):
                rows.copy_(plane.pages[at])
        return Finished()

    def close(self) -> None:
        self._groups, self._arena, self._closed = [], None, True

    def _checked(
        self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], number: int
    ) -> tuple[npt.NDArray[np.uint8], Group]:
        if not self._groups or self._arena is None:
            raise InvalidInput("a device copies after attach and pin, and before close")
        group = group_at(self._groups, number)
        group.bounds.check(segments, block_ids, len(self._arena))
        return self._arena, group


def _pairs(
    arena: npt.NDArray[np.uint8], group: Group, segment: Segment, block_ids: npt.NDArray[np.int64]
) -> Iterator[tuple[Plane, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
    """For each plane: the segment's rows in the arena, and where its tokens are in the pages."""
    positions = np.arange(segment.span.start, segment.span.end)
    blocks, slots = block_ids[positions // group.block_size], positions % group.block_size
    at = torch.from_numpy(blocks), torch.from_numpy(slots)
    for plane in group.planes:
        _, _, heads, width = plane.pages.shape
        row_bytes = heads * width * plane.pages.itemsize
        start = segment.shard + plane.part + segment.row * row_bytes
        rows = torch.from_numpy(arena[start : start + len(positions) * row_bytes]).view(plane.pages.dtype)
        yield plane, rows.view(len(positions), heads, width), at


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
