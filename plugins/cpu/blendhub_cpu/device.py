"""The CPU device: pages and arena both lie in host memory, and torch copies between them with the engine's threads.

Every transfer ends before the call returns. The engine would wait for it anyway: on its cores, both end sooner in turn.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import ArenaProgress, Device, PagedLayer, Rotation, Segment, Transfer
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.devices import Angles, angles_between, pairs_of, read_pages, torch_type
from blendhub_cpu import CpuOptions

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Items are copied as integers of their size, so that no conversion can change the bits of a NaN."""
MOST_COPIES = 4
"""Tokens in more than so many separate ranges of a plane are copied by one index: each copy costs microseconds."""


class Plane(NamedTuple):
    """The keys or the values of a layer."""

    pages: torch.Tensor
    """``[blocks, tokens, heads, width]``, as bits; in tiles, with two axes of tokens and two of width."""
    shard_offset: int
    row_bytes: int
    rotation: Rotation | None

    @property
    def row_shape(self) -> tuple[int, int]:
        """The number of heads and their width."""
        heads, *width = self.pages.shape[self.pages.ndim // 2 :]
        return heads, math.prod(width)

    def parts(self, places: "Places") -> Iterator[tuple[Any, slice]]:
        """Indices of the pages, and which rows belong there."""
        if not places.ranges:
            yield self._at(*places.entries), slice(None)
        for part in places.ranges:
            if self.pages.ndim == 4 or part.slots == slice(None):
                yield (part.blocks, part.slots), part.rows
            else:
                blocks, slots = (entries[part.rows] for entries in places.entries)
                yield self._at(blocks, slots), part.rows

    def shape_at(self, index: Any) -> tuple[int, ...]:
        """The shape of the pages at an index."""
        if isinstance(index[0], slice):
            return tuple(self.pages[index].shape)
        return (-1, *self.pages.shape[self.pages.ndim // 2 :])

    def _at(self, blocks: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.pages.ndim == 4:
            return blocks, slots
        inner = self.pages.shape[2]
        return blocks, slots // inner, slots % inner


class Group(NamedTuple):
    """A group of layers."""

    planes: Sequence[Plane]
    layout: KVLayout
    block_size: int


class Range(NamedTuple):
    """Consecutive tokens that are contiguous in a plane: part of one block, or whole blocks."""

    blocks: slice
    slots: slice
    rows: slice


class Places(NamedTuple):
    """The places of a segment's tokens in the pages."""

    ranges: Sequence[Range]
    """Empty if there are more than ``MOST_COPIES``."""
    entries: tuple[torch.Tensor, torch.Tensor]
    """Each token's block and slot."""


class FinishedTransfer(Transfer):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class CpuDevice(Device):
    overlaps_compute = False

    def __init__(self, options: CpuOptions) -> None:
        self.block_tokens = options.block_tokens
        self._groups: list[Group] = []
        self._arena = torch.empty(0, dtype=torch.uint8)

    def _attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        pages = read_pages(layers, block_size, layout)
        if pages.place.type != "cpu":
            raise Unsupported(
                f"the pages lie on {pages.place}, but device 'cpu' supports only pages in host memory; "
                "choose another device"
            )
        planes: list[Plane] = []
        for index, layer in enumerate(pages.layers):
            keys, values = (
                plane.movedim(1, plane.ndim // 2).view(BITS[plane.itemsize]) for plane in (layer.keys, layer.values)
            )
            planes.append(Plane(keys, layout.keys_at(index), layout.key_row_bytes, layer.rotation))
            if layout.value_dim:
                planes.append(Plane(values, layout.values_at(index), layout.value_row_bytes, None))
        self._groups.append(Group(planes, layout, block_size))

    def _pin(self, arena: npt.NDArray[np.uint8], progress: Callable[[], ArenaProgress] | None) -> None:
        with warnings.catch_warnings():
            # torch has no read-only tensors; saves to such an arena are refused.
            warnings.simplefilter("ignore", UserWarning)
            self._arena = torch.from_numpy(arena)

    def _load(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], group: int) -> Transfer:
        planes, layout, block_size = self._groups[group]
        dtype = torch_type(layout.dtype)
        for segment in segments:
            places = _places(segment, block_ids, block_size)
            angles: dict[int, Angles] = {}
            for plane in planes:
                rows = _rows(self._arena, plane, segment)
                if plane.rotation and segment.source_start != segment.span.start:
                    table = plane.rotation.cos_sin
                    if id(table) not in angles:
                        old, new = (table[at : at + len(rows)] for at in (segment.source_start, segment.span.start))
                        angles[id(table)] = angles_between(old, new)
                    rows = _rotated(rows.view(dtype), plane.rotation, angles[id(table)]).view(rows.dtype)
                for at, part in plane.parts(places):
                    plane.pages[at] = rows[part].view(plane.shape_at(at))
        return FinishedTransfer()

    def _save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], group: int) -> Transfer:
        planes, _, block_size = self._groups[group]
        for segment in segments:
            places = _places(segment, block_ids, block_size)
            for plane in planes:
                rows = _rows(self._arena, plane, segment)
                for at, part in plane.parts(places):
                    rows[part].view(plane.shape_at(at)).copy_(plane.pages[at])
        return FinishedTransfer()

    def _close(self) -> None:
        self._groups.clear()
        self._arena = self._arena[:0].clone()


def _places(segment: Segment, block_ids: npt.NDArray[np.int64], block_size: int) -> Places:
    start, end = segment.span.start, segment.span.end
    positions = np.arange(start, end)
    blocks, slots = block_ids[positions // block_size].astype(np.int64), positions % block_size
    ranges = list(_ranges(start, end, block_ids, block_size))
    return Places(ranges if len(ranges) <= MOST_COPIES else (), (torch.from_numpy(blocks), torch.from_numpy(slots)))


def _ranges(start: int, end: int, block_ids: npt.NDArray[np.int64], block_size: int) -> Iterator[Range]:
    """Whole blocks whose numbers follow each other are one range."""
    size, at = block_size, start
    while at < end:
        number, slot = divmod(at, size)
        block, first = int(block_ids[number]), at - start
        if slot or end - at < size:
            count = min(size - slot, end - at)
            yield Range(slice(block, block + 1), slice(slot, slot + count), slice(first, first + count))
        else:
            n_blocks = 1
            while at + (n_blocks + 1) * size <= end and block_ids[number + n_blocks] == block + n_blocks:
                n_blocks += 1
            count = n_blocks * size
            yield Range(slice(block, block + n_blocks), slice(None), slice(first, first + count))
        at += count


def _rows(arena: torch.Tensor, plane: Plane, segment: Segment) -> torch.Tensor:
    """The segment's rows in the arena, ``[tokens, heads, width]``."""
    start = segment.shard + plane.shard_offset + segment.row * plane.row_bytes
    rows = arena[start : start + len(segment.span) * plane.row_bytes]
    return rows.view(plane.pages.dtype).view(-1, *plane.row_shape)


def _rotated(keys: torch.Tensor, rotation: Rotation, angles: Angles) -> torch.Tensor:
    """A copy of keys ``[tokens, heads, width]``, rotated by these angles."""
    part = slice(rotation.offset, rotation.offset + rotation.cos_sin.shape[1])
    numbers, (cos, sin) = keys[..., part].float(), angles
    rotated = torch.empty_like(numbers)
    first, second = pairs_of(numbers, rotation.neox)
    new_first, new_second = pairs_of(rotated, rotation.neox)
    torch.mul(first, cos, out=new_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=new_second).addcmul_(first, sin)
    if keys.itemsize == 1:
        # Beyond it, a large key would become NaN, and with it all attention to that key.
        largest = torch.finfo(keys.dtype).max
        rotated.clamp_(-largest, largest)
    if rotated.shape == keys.shape:
        return rotated.to(keys.dtype)
    result = keys.clone()
    result[..., part] = rotated.to(keys.dtype)
    return result
