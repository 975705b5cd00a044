"""The CPU device: pages and arena both lie in host memory, and torch copies between them with the engine's threads.

Every transfer ends before the call returns. The engine would wait for it anyway: on its cores, both end sooner in turn.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from blendhub.contracts import ArenaProgress, Device, PagedLayer, PageSegment, Rotation, Segment, Transfer
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Span
from blendhub.devices import Angles, angles_between, pairs_of, read_pages, torch_type
from blendhub_cpu import CpuOptions
from blendhub_cpu.arena_pages import ArenaPages

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Items are copied as integers of their size, so that no conversion can change the bits of a NaN."""
MAX_COPIES = 4
"""Tokens in more than so many separate ranges of a plane are copied by one index: each copy costs microseconds."""


class Part(NamedTuple):
    """Some tokens of a span, in the pages: of one block or of whole blocks, as slices, or anywhere, as numbers."""

    blocks: slice | torch.Tensor
    slots: slice | torch.Tensor
    rows: slice
    """Which of the span's rows belong there."""


class Plane(NamedTuple):
    """The keys or the values of a layer."""

    pages: torch.Tensor
    """``[blocks, tokens, heads, width]``, as bits; in tiles, with two axes of tokens and two of width."""
    shard_offset: int
    row_bytes: int
    rotation: Rotation | None

    def at(self, blocks: slice | torch.Tensor, slots: slice | torch.Tensor) -> tuple[Any, tuple[int, ...]]:
        """The index of tokens in the pages, and the shape of the pages there."""
        are_tiles = self.pages.ndim > 4
        if are_tiles and isinstance(blocks, slice) and isinstance(slots, slice) and slots != slice(None):
            blocks, slots = torch.tensor(blocks.start), torch.arange(slots.start, slots.stop)
        if isinstance(slots, slice):
            return (blocks, slots), tuple(self.pages[blocks, slots].shape)
        inner = self.pages.shape[2]
        index = (blocks, slots // inner, slots % inner) if are_tiles else (blocks, slots)
        return index, (-1, *self.pages.shape[self.pages.ndim // 2 :])


class Group(NamedTuple):
    """A group of layers."""

    planes: Sequence[Plane]
    layout: KVLayout
    block_size: int


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
        self._pages: ArenaPages | None = None

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
        self._drop_arena()
        with warnings.catch_warnings():
            # torch has no read-only tensors; saves to such an arena are refused.
            warnings.simplefilter("ignore", UserWarning)
            self._arena = torch.from_numpy(arena)
        self._pages = ArenaPages(arena, progress)

    def _load(
        self, segments: Sequence[Segment | PageSegment], block_ids: npt.NDArray[np.int64], group: int
    ) -> Transfer:
        planes, layout, block_size = self._groups[group]
        dtype = torch_type(layout.dtype)
        for segment in segments:
            parts = _parts(segment.span, block_ids, block_size)
            rows_of = self._source(segment, block_size)
            angles: dict[int, Angles] = {}
            for plane in planes:
                rows = rows_of(plane)
                if plane.rotation and segment.source_start != segment.span.start:
                    table = plane.rotation.cos_sin
                    if id(table) not in angles:
                        old, new = (table[at : at + len(rows)] for at in (segment.source_start, segment.span.start))
                        angles[id(table)] = angles_between(old, new)
                    rows = _rotated(rows.view(dtype), plane.rotation, angles[id(table)]).view(rows.dtype)
                for blocks, slots, part in parts:
                    at, shape = plane.at(blocks, slots)
                    plane.pages[at] = rows[part].view(shape)
        return FinishedTransfer()

    def _save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], group: int) -> Transfer:
        planes, _, block_size = self._groups[group]
        for segment in segments:
            parts = _parts(segment.span, block_ids, block_size)
            for plane in planes:
                _gather(parts, plane, _stored(self._arena, segment, plane))
        return FinishedTransfer()

    def _source(self, segment: Segment | PageSegment, block_size: int) -> Callable[[Plane], torch.Tensor]:
        """What returns the rows of a segment that is loaded, ``[tokens, heads, width]``, of each plane."""
        if isinstance(segment, Segment):
            return partial(_stored, self._arena, segment)
        rows = Span(segment.row, segment.row + len(segment.span))
        return partial(_gathered, _parts(rows, segment.blocks, block_size), len(rows))

    def _close(self) -> None:
        self._groups.clear()
        self._drop_arena()

    def _drop_arena(self) -> None:
        if self._pages:
            self._pages.stop()
            self._pages = None
        self._arena = self._arena[:0].clone()


def _parts(span: Span, block_ids: npt.NDArray[np.int64], block_size: int) -> list[Part]:
    """Whole blocks whose numbers follow each other are one part."""
    start, end = span.start, span.end
    parts: list[Part] = []
    at = start
    while at < end and len(parts) < MAX_COPIES:
        number, slot = divmod(at, block_size)
        block, n_blocks, n_slots = int(block_ids[number]), 1, min(block_size - slot, end - at)
        is_whole = n_slots == block_size
        while is_whole and at + (n_blocks + 1) * block_size <= end and block_ids[number + n_blocks] == block + n_blocks:
            n_blocks += 1
        first, at = at - start, at + n_blocks * n_slots
        slots = slice(None) if is_whole else slice(slot, slot + n_slots)
        parts.append(Part(slice(block, block + n_blocks), slots, slice(first, at - start)))
    if at == end:
        return parts
    numbers, slots_of_all = np.divmod(np.arange(start, end), block_size)
    blocks = block_ids[numbers].astype(np.int64)
    return [Part(torch.from_numpy(blocks), torch.from_numpy(slots_of_all), slice(None))]


def _stored(arena: torch.Tensor, segment: Segment, plane: Plane) -> torch.Tensor:
    """The segment's rows in the arena."""
    start = segment.shard + plane.shard_offset + segment.row * plane.row_bytes
    return _rows(arena[start : start + len(segment.span) * plane.row_bytes], plane)


def _gathered(parts: Sequence[Part], n_tokens: int, plane: Plane) -> torch.Tensor:
    """A copy of rows in the pages."""
    rows = _rows(torch.empty(n_tokens * plane.row_bytes, dtype=torch.uint8), plane)
    _gather(parts, plane, rows)
    return rows


def _gather(parts: Sequence[Part], plane: Plane, rows: torch.Tensor) -> None:
    for blocks, slots, part in parts:
        at, shape = plane.at(blocks, slots)
        rows[part].view(shape).copy_(plane.pages[at])


def _rows(memory: torch.Tensor, plane: Plane) -> torch.Tensor:
    """Bytes as rows of a plane."""
    heads = plane.pages.shape[plane.pages.ndim // 2]
    return memory.view(plane.pages.dtype).view(len(memory) // plane.row_bytes, heads, -1)


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
