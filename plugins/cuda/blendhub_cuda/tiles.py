"""Segments as work for the GPU: slices that are copied, and tiles of tokens for kernels. Arithmetic without I/O."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blendhub.contracts import Segment
from blendhub.layout import KVLayout
from blendhub_cuda.records import BLOCKS, COUNT, ORIGIN, POSITION, ROW, SLOT, SOURCE

TILE_BYTES = 16384
"""What a program of a kernel copies, about: enough to use the memory's width, little enough for many programs."""
MOST_TILE_TOKENS = 64
MOST_TILES = 2048
"""Of one table, unless one chunk has more; in a small lane there are fewer, to leave it to slices."""

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

    tiles: range
    """Which ones of the table."""
    first_layer: int
    n_layers: int
    slices: tuple[Slice, ...]
    """What staging holds; empty: the kernel works on the arena itself."""


class Work(NamedTuple):
    """Batches that share a table of tiles, which travels to the GPU as a whole: each journey costs the host time."""

    tiles: Tiles
    batches: Sequence[Batch]
    align: int
    """What all places where layer 0 of a shard would begin are multiples of; 0: they are all 0."""


class Cutter:
    """Cuts transfers into batches, each of which finds room in one lane."""

    def __init__(self, layout: KVLayout, block_size: int, lane_bytes: int) -> None:
        self.layout = layout
        self.layer_bytes = layout.keys_at(1)
        row_bytes = max(layout.key_row_bytes, layout.value_row_bytes)
        self.tile_tokens = _power_of_2(min(max(TILE_BYTES // row_bytes, 1), MOST_TILE_TOKENS))
        self.tile_words = BLOCKS + (self.tile_tokens + block_size - 2) // block_size + 1
        self._block_size = block_size
        chunk_tiles = -(-layout.chunk_tokens // self.tile_tokens)
        most_tiles = max(chunk_tiles, min(MOST_TILES, (lane_bytes - self.layer_bytes) // 8 // (8 * self.tile_words)))
        self._most_parts = most_tiles // chunk_tiles
        self.table_bytes = -(-most_tiles * self.tile_words * 8 // 256) * 256
        """The first part of a lane, which holds a table."""
        self.room = lane_bytes - self.table_bytes
        """The rest of a lane, which holds the slices of a batch."""

    @property
    def nothing(self) -> Work:
        """A batch without tokens."""
        return Work(np.empty((0, self.tile_words), np.int64), [Batch(range(0), 0, self.layout.layers, ())], 0)

    def work(
        self, segments: Iterable[Segment], block_ids: npt.NDArray[np.int64], skipped: int, stage_parts: bool
    ) -> Iterator[Work]:
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
        for first in range(0, len(staged), self._most_parts):
            yield self._staged(staged[first : first + self._most_parts], block_ids)
        for first in range(0, len(direct), self._most_parts):
            parts = direct[first : first + self._most_parts]
            shards = [part.shard for part in parts]
            tiles, _ = self._tiles(parts, shards, block_ids)
            yield Work(tiles, [Batch(range(len(tiles)), 0, self.layout.layers, ())], gcd(*shards))

    def _staged(self, parts: Sequence["_Part"], block_ids: npt.NDArray[np.int64]) -> Work:
        together = self.room // self.layout.shard_bytes
        if not together:
            tiles, ends = self._tiles(parts, [0] * len(parts), block_ids)
            return Work(tiles, list(self._by_layers(parts, ends)), 0)
        places = [number % together * self.layout.shard_bytes for number in range(len(parts))]
        tiles, ends = self._tiles(parts, places, block_ids)
        slices = [Slice(part.shard, place, part.row, part.count) for part, place in zip(parts, places, strict=True)]
        batches = []
        for first in range(0, len(parts), together):
            some = slices[first : first + together]
            batches.append(Batch(range(ends[first], ends[first + len(some)]), 0, self.layout.layers, tuple(some)))
        return Work(tiles, batches, gcd(*places))

    def _by_layers(self, parts: Sequence["_Part"], ends: Sequence[int]) -> Iterator[Batch]:
        """Batches of some layers of one chunk, about equally many, each at the beginning of staging."""
        layers = self.layout.layers
        n_batches = -(-layers // (self.room // self.layer_bytes))
        borders = [layers * number // n_batches for number in range(n_batches + 1)]
        for number, part in enumerate(parts):
            for layer, end in itertools.pairwise(borders):
                one = Slice(part.shard + self.layout.keys_at(layer), 0, part.row, part.count)
                yield Batch(range(ends[number], ends[number + 1]), layer, end - layer, (one,))

    def _tiles(
        self, parts: Sequence["_Part"], origins: Sequence[int], block_ids: npt.NDArray[np.int64]
    ) -> tuple[Tiles, list[int]]:
        """The parts' tokens, and where the tiles of each part end, after a 0.

        Layer 0 of a part's shard would begin at its origin.
        """
        start, count, _, row, source = np.array(parts, np.int64).reshape(-1, 5).T
        n_tiles = -(-count // self.tile_tokens)
        ends = np.concatenate([[0], np.cumsum(n_tiles)])
        owner = np.repeat(np.arange(len(parts)), n_tiles)
        # Counts from 0 within each part.
        gone = (np.arange(len(owner)) - ends[owner]) * self.tile_tokens
        position = start[owner] + gone
        first_block = position // self._block_size
        tiles = np.empty((len(owner), self.tile_words), np.int64)
        tiles[:, COUNT] = np.minimum(count[owner] - gone, self.tile_tokens)
        tiles[:, SLOT] = position - first_block * self._block_size
        tiles[:, POSITION] = position
        tiles[:, SOURCE] = source[owner] + gone
        tiles[:, ORIGIN] = np.array(origins, np.int64)[owner]
        tiles[:, ROW] = row[owner] + gone
        # A tile that ends early has no use for its last blocks, and the block table need not have them.
        wanted = first_block[:, None] + np.arange(self.tile_words - BLOCKS)
        tiles[:, BLOCKS:] = block_ids[np.minimum(wanted, len(block_ids) - 1)]
        return tiles, ends.tolist()


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
