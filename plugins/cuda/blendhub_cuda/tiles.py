"""Segments as work for the GPU: slices that are copied, and tiles of tokens for kernels. Arithmetic without I/O."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blendhub.contracts import Segment
from blendhub.layout import KVLayout
from blendhub_cuda.records import BLOCKS, COUNT, ORIGIN, POSITION, ROW, SLOT, SOURCE

TILE_BYTES = 16384
"""What a program of a kernel copies, about: enough to use the memory's width, little enough for many programs."""
MOST_TILE_TOKENS = 64
MOST_TILES = 256
"""Of one batch, unless one chunk has more."""

Tiles = npt.NDArray[np.int64]


class Slice(NamedTuple):
    """Some layers of a segment's shard, which lie side by side."""

    at: int
    """Where they begin in the arena."""
    staging_at: int
    row: int
    count: int
    """Only these rows are the segment's."""


class Batch(NamedTuple):
    """What one launch of a kernel does."""

    tiles: Tiles
    first_layer: int
    n_layers: int
    slices: tuple[Slice, ...]
    """What staging holds; empty: the kernel works on the arena itself."""


class Cutter:
    """Cuts transfers into batches, each of which finds room in one lane."""

    def __init__(self, layout: KVLayout, block_size: int, lane_bytes: int) -> None:
        self.layout = layout
        self.layer_bytes = layout.keys_at(1)
        row_bytes = max(layout.key_row_bytes, layout.value_row_bytes)
        self.tile_tokens = _power_of_2(min(max(TILE_BYTES // row_bytes, 1), MOST_TILE_TOKENS))
        self.tile_words = BLOCKS + (self.tile_tokens + block_size - 2) // block_size + 1
        self._block_size = block_size
        self._chunk_tiles = -(-layout.chunk_tokens // self.tile_tokens)
        self.most_tiles = max(self._chunk_tiles, MOST_TILES)
        self.table_bytes = -(-self.most_tiles * self.tile_words * 8 // 256) * 256
        """The first part of a lane, which holds the tiles of a batch."""
        self.room = lane_bytes - self.table_bytes
        """The rest of a lane, which holds its slices."""

    @property
    def nothing(self) -> Batch:
        """A batch without tokens."""
        return Batch(np.empty((0, self.tile_words), np.int64), 0, self.layout.layers, ())

    def batches(
        self, segments: Iterable[Segment], block_ids: npt.NDArray[np.int64], skipped: int, stage_parts: bool
    ) -> Iterator[Batch]:
        """The tokens of the segments from ``skipped`` on. Whole chunks are staged; parts too if ``stage_parts``."""
        staged, direct = [], []
        for segment in segments:
            gone = min(max(skipped - segment.span.start, 0), len(segment.span))
            count = len(segment.span) - gone
            part = _Part(
                segment.span.start + gone, count, segment.shard, segment.row + gone, segment.source_start + gone
            )
            if count:
                (staged if stage_parts or count == self.layout.chunk_tokens else direct).append(part)
        yield from self._staged(staged, block_ids)
        tiles = self._tiles(direct, [part.shard for part in direct], block_ids)
        for first in range(0, len(tiles), self.most_tiles):
            yield Batch(tiles[first : first + self.most_tiles], 0, self.layout.layers, ())

    def _staged(self, parts: Sequence["_Part"], block_ids: npt.NDArray[np.int64]) -> Iterator[Batch]:
        shard_bytes, n_layers = self.layout.shard_bytes, self.layout.layers
        together = min(self.room // shard_bytes, self.most_tiles // self._chunk_tiles)
        if together:
            for first in range(0, len(parts), together):
                some = parts[first : first + together]
                places = [number * shard_bytes for number in range(len(some))]
                slices = (
                    Slice(part.shard, place, part.row, part.count) for part, place in zip(some, places, strict=True)
                )
                yield Batch(self._tiles(some, places, block_ids), 0, n_layers, tuple(slices))
            return
        step = self.room // self.layer_bytes
        for part in parts:
            for layer in range(0, n_layers, step):
                at = self.layout.keys_at(layer)
                tiles = self._tiles([part], [-at], block_ids)
                one = Slice(part.shard + at, 0, part.row, part.count)
                yield Batch(tiles, layer, min(step, n_layers - layer), (one,))

    def _tiles(self, parts: Sequence["_Part"], origins: Sequence[int], block_ids: npt.NDArray[np.int64]) -> Tiles:
        """The parts' tokens; layer 0 of a part's shard would begin at its origin."""
        start, count, _, row, source = np.array(parts, np.int64).reshape(-1, 5).T
        n_tiles = -(-count // self.tile_tokens)
        owner = np.repeat(np.arange(len(parts)), n_tiles)
        # Counts from 0 within each part.
        gone = (np.arange(len(owner)) - np.repeat(np.cumsum(n_tiles) - n_tiles, n_tiles)) * self.tile_tokens
        position = start[owner] + gone
        first_block = position // self._block_size
        tiles = np.empty((len(owner), self.tile_words), np.int64)
        tiles[:, COUNT] = np.minimum(count[owner] - gone, self.tile_tokens)
        tiles[:, SLOT] = position - first_block * self._block_size
        tiles[:, POSITION] = position
        tiles[:, SOURCE] = source[owner] + gone
        tiles[:, ORIGIN] = np.array(origins, np.int64)[owner]
        tiles[:, ROW] = row[owner] + gone
        if len(owner):
            # A tile that ends early has no use for its last blocks, and the table need not have them.
            wanted = first_block[:, None] + np.arange(self.tile_words - BLOCKS)
            tiles[:, BLOCKS:] = block_ids[np.minimum(wanted, len(block_ids) - 1)]
        return tiles


class _Part(NamedTuple):
    """What is left of a segment."""

    start: int
    count: int
    shard: int
    row: int
    source: int


def _power_of_2(number: int) -> int:
    """The largest that is not larger."""
    return 1 << (number.bit_length() - 1)
