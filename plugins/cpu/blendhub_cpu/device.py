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
from blendhub.core.errors import InvalidInput, Unsupported
from blendhub.core.layout import KVLayout
from blendhub.devices import (
    TENSOR_TYPES,
    Angles,
    Bounds,
    after_prefix,
    angles_between,
    check_arena,
    check_chunks,
    check_writable,
    group_at,
    pairs_of,
    read_pages,
)
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
        for one in places.ranges:
            if self.pages.ndim == 4 or one.slots == slice(None):
                yield (one.blocks, one.slots), one.rows
            else:
                blocks, slots = (entries[one.rows] for entries in places.entries)
                yield self._at(blocks, slots), one.rows

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
    bounds: Bounds


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
        self._arena: npt.NDArray[np.uint8] | None = None
        self._arena_tensor: torch.Tensor | None = None
        self._closed = False

    @torch.inference_mode(False)  # tensors that are made inside of it could not be written outside of it
    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        if self._closed:
            raise InvalidInput("this device is closed; create another one")
        pages = read_pages(layers, block_size, layout, self.formats)
        if pages.place.type != "cpu":
            raise Unsupported(
                f"the pages lie on {pages.place}, but device 'cpu' supports only pages in host memory; "
                "choose another device"
            )
        if self._groups:
            check_chunks(layout, self._groups[0].layout)
        planes: list[Plane] = []
        for index, layer in enumerate(pages.layers):
            keys, values = (
                plane.movedim(1, plane.ndim // 2).view(BITS[plane.itemsize]) for plane in (layer.keys, layer.values)
            )
            planes.append(Plane(keys, layout.keys_at(index), layout.key_row_bytes, layer.rotation))
            if layout.value_dim:
                planes.append(Plane(values, layout.values_at(index), layout.value_row_bytes, None))
        self._groups.append(Group(planes, layout, block_size, Bounds(layout, block_size, pages)))

    @torch.inference_mode(False)
    def pin(self, arena: npt.NDArray[np.uint8], progress: Callable[[], ArenaProgress] | None = None) -> None:
        if self._closed:
            raise InvalidInput("this device is closed; create another one")
        check_arena(arena)
        with warnings.catch_warnings():
            # torch has no read-only tensors; saves to such an arena are refused.
            warnings.simplefilter("ignore", UserWarning)
            self._arena, self._arena_tensor = arena, torch.from_numpy(arena)

    def load(
        self,
        segments: Sequence[Segment],
        block_ids: npt.NDArray[np.int64],
        skip_prefix_n_tokens: int = 0,
        group: int = 0,
    ) -> Transfer:
        arena, one_group = self._checked(segments, block_ids, group)
        one_group.bounds.check_load(segments, skip_prefix_n_tokens)
        dtype = TENSOR_TYPES[one_group.layout.dtype][0]
        for segment in after_prefix(segments, skip_prefix_n_tokens):
            places = _places(segment, block_ids, one_group.block_size)
            known: dict[int, Angles] = {}
            for plane in one_group.planes:
                rows = _rows(arena, plane, segment)
                if plane.rotation and segment.source_start != segment.span.start:
                    table = plane.rotation.cos_sin
                    if id(table) not in known:
                        old, new = (table[at : at + len(rows)] for at in (segment.source_start, segment.span.start))
                        known[id(table)] = angles_between(old, new)
                    rows = _rotated(rows.view(dtype), plane.rotation, known[id(table)]).view(rows.dtype)
                for at, part in plane.parts(places):
                    plane.pages[at] = rows[part].view(plane.shape_at(at))
        return FinishedTransfer()

    def save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], group: int = 0) -> Transfer:
        arena, one_group = self._checked(segments, block_ids, group, writes=True)
        for segment in after_prefix(segments, 0):
            places = _places(segment, block_ids, one_group.block_size)
            for plane in one_group.planes:
                rows = _rows(arena, plane, segment)
                for at, part in plane.parts(places):
                    rows[part].view(plane.shape_at(at)).copy_(plane.pages[at])
        return FinishedTransfer()

    def close(self) -> None:
        self._groups, self._arena, self._arena_tensor, self._closed = [], None, None, True

    def _checked(
        self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], number: int, *, writes: bool = False
    ) -> tuple[torch.Tensor, Group]:
        if not self._groups or self._arena is None or self._arena_tensor is None:
            problem = "is closed" if self._closed else "needs attach and pin before it can copy"
            raise InvalidInput(f"device 'cpu' {problem}")
        group = group_at(self._groups, number)
        group.bounds.check(segments, block_ids, self._arena.size)
        if writes:
            check_writable(self._arena)
        return self._arena_tensor, group


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
    one, other = pairs_of(numbers, rotation.neox)
    first, second = pairs_of(rotated, rotation.neox)
    torch.mul(one, cos, out=first).addcmul_(other, sin, value=-1)
    torch.mul(other, cos, out=second).addcmul_(one, sin)
    if keys.itemsize == 1:
        # Beyond it, a large key would become NaN, and with it all attention to that key.
        largest = torch.finfo(keys.dtype).max
        rotated.clamp_(-largest, largest)
    if rotated.shape == keys.shape:
        return rotated.to(keys.dtype)
    result = keys.clone()
    result[..., part] = rotated.to(keys.dtype)
    return result
