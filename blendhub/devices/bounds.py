"""Bounds checks of a transfer's segments and arena, made before the transfer starts, and the skipped prefix."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from blendhub.contracts import Segment
from blendhub.core.errors import InvalidInput, LayoutMismatch
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Span
from blendhub.devices.pages import Pages

Group = TypeVar("Group")


def group_at(groups: Sequence[Group], number: int) -> Group:
    """The attached group of this number; raises InvalidInput if there is none."""
    if not 0 <= number < len(groups):
        raise InvalidInput(f"there is no group {number} of layers: {len(groups)} are attached")
    return groups[number]


def after_prefix(segments: Iterable[Segment], skip_prefix_n_tokens: int) -> Iterator[Segment]:
    """What is left of the segments from token ``skip_prefix_n_tokens`` on."""
    for segment in segments:
        start, end = segment.span.start, segment.span.end
        n_skipped = max(skip_prefix_n_tokens - start, 0)
        if start + n_skipped < end:
            source = segment.source_start + n_skipped
            yield Segment(Span(start + n_skipped, end), segment.shard, segment.row + n_skipped, source)


def check_arena(arena: npt.NDArray[np.uint8]) -> None:
    """Raise InvalidInput unless the arena is a flat array of bytes."""
    if arena.dtype != np.uint8 or arena.ndim != 1 or not arena.flags.c_contiguous:
        raise InvalidInput(f"an arena is a flat array of bytes, got {arena.dtype} of shape {arena.shape}")


def check_writable(arena: npt.NDArray[np.uint8]) -> None:
    """Raise InvalidInput unless the arena can be saved to."""
    if not arena.flags.writeable:
        raise InvalidInput("the arena is read-only, so nothing can be saved; pin a writable one")


def check_chunks(layout: KVLayout, first: KVLayout) -> None:
    """Raise LayoutMismatch if the chunks of a group of layers are longer than those of the first group."""
    if layout.chunk_tokens > first.chunk_tokens:
        raise LayoutMismatch(
            f"a group of layers has chunks of {layout.chunk_tokens} tokens, and the first group of {first.chunk_tokens}"
        )


class Bounds:
    """The limits of segments: shards, arena, block table, pages and rotation tables."""

    def __init__(self, layout: KVLayout, block_size: int, pages: Pages) -> None:
        self._layout = layout
        self._block_size = block_size
        self._n_blocks = pages.n_blocks
        self._n_positions = pages.n_positions

    def check(self, segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], arena_bytes: int) -> None:
        """Raise InvalidInput unless each segment stays within its shard, the arena, the block table and the pages."""
        if block_ids.ndim != 1 or block_ids.dtype.kind not in "iu":
            raise InvalidInput(
                f"block_ids must be a flat array of integers, got {block_ids.dtype} of shape {block_ids.shape}"
            )
        chunk_tokens, shard_bytes = self._layout.chunk_tokens, self._layout.shard_bytes
        n_tokens = len(block_ids) * self._block_size
        for segment in segments:
            if not 0 <= segment.row <= chunk_tokens - len(segment.span):
                raise InvalidInput(f"{segment} leaves its shard of {chunk_tokens} rows")
            if not 0 <= segment.shard <= arena_bytes - shard_bytes:
                raise InvalidInput(f"{segment} leaves the arena: shards of {shard_bytes} bytes, {arena_bytes} in all")
            if segment.span.end > n_tokens:
                raise InvalidInput(
                    f"{segment} leaves the block table: {len(block_ids)} blocks of {self._block_size} tokens"
                )
            used = block_ids[segment.span.start // self._block_size : -(-segment.span.end // self._block_size)]
            if len(used) and not (used.min() >= 0 and used.max() < self._n_blocks):
                raise InvalidInput(
                    f"{segment} leaves the pages: it lies in blocks {used.tolist()}, but there are {self._n_blocks}"
                )

    def check_load(self, segments: Sequence[Segment], skip_prefix_n_tokens: int) -> None:
        """Raise InvalidInput for overlapping segments, and for positions that no rotation table covers."""
        if skip_prefix_n_tokens < 0:
            raise InvalidInput(f"skip_prefix_n_tokens must be 0 or more, got {skip_prefix_n_tokens}")
        known = self._n_positions
        for segment in segments:
            start, source = segment.span.start, segment.source_start
            last = max(start, source) + len(segment.span)
            if source < 0 or (known is not None and source != start and last > known):
                raise InvalidInput(f"{segment} leaves the positions of the rotation: there are {known}")
        spans = sorted(segment.span for segment in segments if len(segment.span))
        for one, next_one in itertools.pairwise(spans):
            if next_one.start < one.end:
                raise InvalidInput(f"two segments of one load overlap: {one} and {next_one}")
