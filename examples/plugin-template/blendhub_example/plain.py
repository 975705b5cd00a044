"""A device in one file, in plain torch: pages of every format become views, and an index picks tokens from them.

Copies are made before a call returns, so there is nothing to wait for.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch

from blendhub import Span
from blendhub.contracts import Device, PagedLayer, PageFormat, Rotation, Segment, Transfer
from blendhub.errors import InvalidInput, LayoutMismatch, Unsupported
from blendhub.layout import ITEM_SIZES, KVLayout

TYPES = {name: getattr(torch, "float8_e4m3fn" if name == "float8_e4m3" else name) for name in ITEM_SIZES}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Numbers are copied as integers of their size, so that every bit of them is."""


class Plane(NamedTuple):
    """The keys or the values of a layer."""

    pages: torch.Tensor
    """``[blocks, tokens, heads, width]``, as bits."""
    part: int
    """Where they begin in a shard."""
    rotation: Rotation | None


class Finished(Transfer):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class PlainDevice(Device):
    block_tokens = 16

    def __init__(self) -> None:
        self._planes: list[Plane] = []
        self._arena: torch.Tensor | None = None

    def attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        if len(layers) != layout.layers:
            raise LayoutMismatch(f"{len(layers)} layers were given, but the layout has {layout.layers}")
        planes: list[Plane] = []
        for index, layer in enumerate(layers):
            keys, values = _views(layer, block_size, layout)
            planes.append(Plane(keys, layout.keys_at(index), layer.rotation))
            planes.append(Plane(values, layout.values_at(index), None))
        self._planes, self._block_size, self._layout = planes, block_size, layout
        self._n_blocks = min(len(plane.pages) for plane in planes)
        tables = [layer.rotation.cos_sin for layer in layers if layer.rotation]
        self._n_positions = min(map(len, tables), default=sys.maxsize)

    def pin(self, arena: npt.NDArray[np.uint8]) -> None:
        self._arena = torch.from_numpy(arena)

    def load(
        self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], skip_prefix_n_tokens: int = 0
    ) -> Transfer:
        arena = self._checked_arena(segments, block_ids)
        self._check_load(segments, skip_prefix_n_tokens)
        for segment in segments:
            kept = _from(segment, skip_prefix_n_tokens)
            new = torch.arange(kept.span.start, kept.span.end)
            old = new + kept.source_start - kept.span.start
            for plane, rows, at in self._pairs(arena, kept, block_ids):
                if plane.rotation and kept.source_start != kept.span.start:
                    rows = _turned(rows.view(TYPES[self._layout.dtype]), plane.rotation, old, new).view(rows.dtype)
                plane.pages[at] = rows
        return Finished()

    def save(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64]) -> Transfer:
        arena = self._checked_arena(segments, block_ids)
        for segment in segments:
            for plane, rows, at in self._pairs(arena, segment, block_ids):
                rows.copy_(plane.pages[at])
        return Finished()

    def close(self) -> None:
        self._planes, self._arena = [], None

    def _pairs(
        self, arena: torch.Tensor, segment: Segment, block_ids: npt.NDArray[np.int64]
    ) -> Iterator[tuple[Plane, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]:
        """For each plane: the segment's rows in the arena, and where its tokens are in the pages."""
        positions = np.arange(segment.span.start, segment.span.end)
        blocks, slots = block_ids[positions // self._block_size], positions % self._block_size
        at = torch.from_numpy(blocks), torch.from_numpy(slots)
        for plane in self._planes:
            _, _, heads, width = plane.pages.shape
            row_bytes = heads * width * plane.pages.itemsize
            start = segment.shard + plane.part + segment.row * row_bytes
            rows = arena[start : start + len(positions) * row_bytes].view(plane.pages.dtype)
            yield plane, rows.view(len(positions), heads, width), at

    def _checked_arena(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64]) -> torch.Tensor:
        if not self._planes or self._arena is None:
            raise InvalidInput("a device copies after attach and pin, and before close")
        layout, size = self._layout, self._block_size
        for segment in segments:
            used = block_ids[segment.span.start // size : -(-segment.span.end // size)]
            if not 0 <= segment.row <= layout.chunk_tokens - len(segment.span):
                raise InvalidInput(f"{segment} leaves its shard of {layout.chunk_tokens} rows")
            if not 0 <= segment.shard <= len(self._arena) - layout.shard_bytes:
                raise InvalidInput(f"{segment} leaves the arena of {len(self._arena)} bytes")
            if segment.span.end > len(block_ids) * size:
                raise InvalidInput(f"{segment} leaves the block table of {len(block_ids)} blocks of {size} tokens")
            if not ((used >= 0) & (used < self._n_blocks)).all():
                raise InvalidInput(f"{segment} leaves the pages: of blocks {used.tolist()} there are {self._n_blocks}")
        return self._arena

    def _check_load(self, segments: Sequence[Segment], skip_prefix_n_tokens: int) -> None:
        if skip_prefix_n_tokens < 0:
            raise InvalidInput(f"skip_prefix_n_tokens must be 0 or more, got {skip_prefix_n_tokens}")
        for segment in segments:
            source, start = segment.source_start, segment.span.start
            last = max(source, start) + len(segment.span)
            if source != start and (source < 0 or last > self._n_positions):
                raise InvalidInput(f"{segment} leaves the {self._n_positions} positions of the rotation")
        spans = sorted(segment.span for segment in segments if len(segment.span))
        for one, following in itertools.pairwise(spans):
            if following.start < one.end:
                raise InvalidInput(f"two segments of one load overlap: {one} and {following}")


def _from(segment: Segment, position: int) -> Segment:
    """What of the segment is at this position or behind it."""
    gone = min(max(position - segment.span.start, 0), len(segment.span))
    kept = Span(segment.span.start + gone, segment.span.end)
    return Segment(kept, segment.shard, segment.row + gone, segment.source_start + gone)


def _turned(keys: torch.Tensor, rotation: Rotation, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A copy of keys ``[tokens, heads, width]``, turned from their old positions to new ones."""
    cos_old, sin_old = rotation.cos_sin[old].chunk(2, dim=-1)
    cos_new, sin_new = rotation.cos_sin[new].chunk(2, dim=-1)
    scale = cos_old * cos_old + sin_old * sin_old
    cos = ((cos_new * cos_old + sin_new * sin_old) / scale).unsqueeze(1)
    sin = ((sin_new * cos_old - cos_new * sin_old) / scale).unsqueeze(1)
    turning = slice(rotation.offset, rotation.offset + rotation.cos_sin.shape[1])
    numbers = keys[..., turning].float()
    one, other = numbers.chunk(2, dim=-1) if rotation.neox else (numbers[..., ::2], numbers[..., 1::2])
    pairs = one * cos - other * sin, other * cos + one * sin
    numbers = torch.cat(pairs, -1) if rotation.neox else torch.stack(pairs, -1).flatten(-2)
    if keys.itemsize == 1:
        largest = torch.finfo(keys.dtype).max
        numbers = numbers.clamp(-largest, largest)
    result = keys.clone()
    result[..., turning] = numbers.to(keys.dtype)
    return result


def _views(layer: PagedLayer, block_size: int, layout: KVLayout) -> list[torch.Tensor]:
    """A layer's keys and values as views ``[blocks, tokens, heads, width]`` of its pages, as bits."""
    if layer.format not in get_args(PageFormat) or layer.tensors[0].device.type != "cpu":
        raise Unsupported(f"{layer.name!r} has {layer.format!r} pages on {layer.tensors[0].device}; see PageFormat")
    if layer.rotation and layout.dtype == "int8":
        raise Unsupported(f"{layer.name!r} keeps keys as int8, whose scales are unknown, so they cannot be turned")
    try:
        views = _split(layer, block_size, layout)
    except RuntimeError:
        views = ()
    given = [tuple(view.shape[1:]) for view in views]
    wanted = [(block_size, layout.kv_heads, width) for width in (layout.key_dim, layout.value_dim)]
    if given != wanted or any(pages.dtype != TYPES[layout.dtype] for pages in layer.tensors):
        pages = ", ".join(f"{pages.dtype} of shape {list(pages.shape)}" for pages in layer.tensors)
        raise LayoutMismatch(
            f"{layer.name!r} has {layer.format!r} pages {pages}, not as {layout} asks for in blocks of {block_size}"
        )
    return [view.view(BITS[view.itemsize]) for view in views]


def _split(layer: PagedLayer, block_size: int, layout: KVLayout) -> Sequence[torch.Tensor]:
    """The same for pages that fit; for others views of other shapes, or torch raises RuntimeError."""
    widths = [layout.key_dim, layout.value_dim]
    match layer.format, layer.tensors:
        case "packed_heads", (pages,):
            return pages.transpose(1, 2).split_with_sizes(widths, -1)
        case "packed_tokens", (pages,):
            return pages.split_with_sizes(widths, -1)
        case "packed_transposed", (pages,):
            keys, values = pages.split_with_sizes([block_size * width for width in widths], -1)
            keys = keys.unflatten(-1, (widths[0], block_size)).permute(0, 3, 1, 2)
            return keys, values.unflatten(-1, (block_size, widths[1])).transpose(1, 2)
        case "kv_first", (pages,):
            return pages.unbind()
        case "latent", (pages,):
            return pages.unsqueeze(2), pages.unsqueeze(2)[..., :0]
        case "split", pages:
            return pages
    return ()
