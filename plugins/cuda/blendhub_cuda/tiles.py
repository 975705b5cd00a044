"""Plans a transfer: slices for the copy engine, and tiles of tokens for kernels. Arithmetic without I/O."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blendhub.contracts import Segment
from blendhub.core.layout import ITEM_SIZES, KVLayout
from blendhub.devices import BatchPlanner, Slice, after_prefix
from blendhub_cuda.records import BLOCKS, COUNT, ORIGIN, POSITION, ROW, SLOT, SOURCE

TILE_BYTES = 16384
"""About the bytes that one program of a kernel copies: wide accesses, and still many programs."""
MAX_TILE_TOKENS = 64
MAX_TILES = 2048
"""The most tiles of one table, unless one chunk has more. Small streams have fewer, to leave room for slices."""

Tiles = npt.NDArray[np.int64]


class LayerSlice(NamedTuple):
    """Some consecutive layers of a segment's shard."""

    at: int
    """The offset of the first of these layers in the arena."""
    staging_at: int
    nbytes: int
    row: int
    count: int
    """Only rows ``[row, row + count)`` belong to the segment."""


class Batch(NamedTuple):
    """The work of one kernel launch."""

    tiles: range
    """Indices in the group's table."""
    first_layer: int
    n_layers: int
    slices: tuple[LayerSlice, ...]
    """The contents of staging; empty: the kernel reads and writes the arena itself."""


class BatchGroup(NamedTuple):
    """Batches that share one table of tiles, because each copy of a table costs the host time."""

    table: Tiles
    batches: Sequence[Batch]
    align: int
    """The greatest common divisor of the tiles' origins; 0: all origins are 0."""


class TilePlanner(BatchPlanner):
    """Splits transfers into batches that each fit into the staging of one stream."""

    def __init__(self, layout: KVLayout, block_size: int, stream_bytes: int) -> None:
        self.layout = layout
        row_bytes = max(layout.key_row_bytes, layout.value_row_bytes)
        self.tile_tokens = _floor_power_of_2(min(max(TILE_BYTES // row_bytes, 1), MAX_TILE_TOKENS))
        self.tile_words = BLOCKS + (self.tile_tokens + block_size - 2) // block_size + 1
        self._block_size = block_size
        chunk_tiles = -(-layout.chunk_tokens // self.tile_tokens)
        max_tiles = max(chunk_tiles, min(MAX_TILES, (stream_bytes - self.layer_bytes) // 8 // (8 * self.tile_words)))
        self._max_rests = max_tiles // chunk_tiles
        self.table_bytes = -(-max_tiles * self.tile_words * 8 // 256) * 256
        self.staging_bytes = stream_bytes - self.table_bytes

    @property
    def empty_groups(self) -> list[BatchGroup]:
        """One batch without tokens, of shards at any multiple of 16 bytes, and one of shards at odd items."""
        nothing, batches = np.empty((0, self.tile_words), np.int64), [Batch(range(0), 0, self.layout.layers, ())]
        return [BatchGroup(nothing, batches, align) for align in (0, ITEM_SIZES[self.layout.dtype])]

    def batch_groups(
        self,
        segments: Iterable[Segment],
        block_ids: npt.NDArray[np.int64],
        skip_prefix_n_tokens: int,
        stage_partial_chunks: bool,
    ) -> Iterator[BatchGroup]:
        """Whole chunks go through staging; parts of chunks do so only if ``stage_partial_chunks``."""
        staged, direct = [], []
        for rest in itertools.starmap(_SegmentRest, after_prefix(segments, skip_prefix_n_tokens).tolist()):
            (staged if stage_partial_chunks or rest.count == self.layout.chunk_tokens else direct).append(rest)
        for first in range(0, len(staged), self._max_rests):
            yield self._staged(staged[first : first + self._max_rests], block_ids)
        for first in range(0, len(direct), self._max_rests):
            rests = direct[first : first + self._max_rests]
            shards = [rest.shard for rest in rests]
            tiles, _ = self._tiles(rests, shards, block_ids)
            yield BatchGroup(tiles, [Batch(range(len(tiles)), 0, self.layout.layers, ())], gcd(*shards))

    def rows_of(self, batch: Batch) -> Iterator[Slice]:
        kinds = (0, self.layout.key_row_bytes), (self.layout.values_at(0), self.layout.value_row_bytes)
        for one in batch.slices:
            if one.count == self.layout.chunk_tokens:
                yield Slice(one.at, one.staging_at, one.nbytes)
                continue
            for layer in range(batch.n_layers):
                for part, row_bytes in kinds:
                    at = self.layout.keys_at(layer) + part + one.row * row_bytes
                    yield Slice(one.at + at, one.staging_at + at, one.count * row_bytes)

    def _staged(self, rests: Sequence["_SegmentRest"], block_ids: npt.NDArray[np.int64]) -> BatchGroup:
        chunks_per_batch = self.staging_bytes // self.layout.shard_bytes
        if not chunks_per_batch:
            tiles, ends = self._tiles(rests, [0] * len(rests), block_ids)
            return BatchGroup(tiles, list(self._by_layers(rests, ends)), 0)
        places = [number % chunks_per_batch * self.layout.shard_bytes for number in range(len(rests))]
        tiles, ends = self._tiles(rests, places, block_ids)
        nbytes = self.layout.shard_bytes
        slices = [
            LayerSlice(rest.shard, place, nbytes, rest.row, rest.count)
            for rest, place in zip(rests, places, strict=True)
        ]
        batches = []
        for first in range(0, len(rests), chunks_per_batch):
            some = slices[first : first + chunks_per_batch]
            batches.append(Batch(range(ends[first], ends[first + len(some)]), 0, self.layout.layers, tuple(some)))
        return BatchGroup(tiles, batches, gcd(*places))

    def _by_layers(self, rests: Sequence["_SegmentRest"], ends: Sequence[int]) -> Iterator[Batch]:
        """Batches of about equally many layers of one chunk, each at the beginning of staging."""
        layers = self.layout.layers
        n_batches = -(-layers // (self.staging_bytes // self.layer_bytes))
        borders = [layers * number // n_batches for number in range(n_batches + 1)]
        for number, rest in enumerate(rests):
            for layer, end in itertools.pairwise(borders):
                nbytes = (end - layer) * self.layer_bytes
                one = LayerSlice(rest.shard + self.layout.keys_at(layer), 0, nbytes, rest.row, rest.count)
                yield Batch(range(ends[number], ends[number + 1]), layer, end - layer, (one,))

    def _tiles(
        self, rests: Sequence["_SegmentRest"], origins: Sequence[int], block_ids: npt.NDArray[np.int64]
    ) -> tuple[Tiles, list[int]]:
        """The table of tiles of the rests' tokens, and the borders of each rest's tiles in it.

        ``origins`` has, for each rest, the offset at which layer 0 of its shard would begin.
        """
        start, end, _, row, source = np.array(rests, np.int64).reshape(-1, 5).T
        n_tiles = -(-(end - start) // self.tile_tokens)
        ends = np.concatenate([[0], np.cumsum(n_tiles)])
        owner = np.repeat(np.arange(len(rests)), n_tiles)
        # Tokens of the rest before the tile.
        n_before = (np.arange(len(owner)) - ends[owner]) * self.tile_tokens
        position = start[owner] + n_before
        first_block = position // self._block_size
        tiles = np.empty((len(owner), self.tile_words), np.int64)
        tiles[:, COUNT] = np.minimum(end[owner] - position, self.tile_tokens)
        tiles[:, SLOT] = position - first_block * self._block_size
        tiles[:, POSITION] = position
        tiles[:, SOURCE] = source[owner] + n_before
        tiles[:, ORIGIN] = np.array(origins, np.int64)[owner]
        tiles[:, ROW] = row[owner] + n_before
        # A short tile does not use its last blocks, and the block table may end before them.
        wanted = first_block[:, None] + np.arange(self.tile_words - BLOCKS)
        tiles[:, BLOCKS:] = block_ids[np.minimum(wanted, len(block_ids) - 1)]
        return tiles, ends.tolist()


class _SegmentRest(NamedTuple):
    """A segment without its skipped tokens."""

    start: int
    end: int
    shard: int
    row: int
    source: int

    @property
    def count(self) -> int:
        return self.end - self.start


def _floor_power_of_2(number: int) -> int:
    """The largest power of 2 that is at most ``number``."""
    return 1 << (number.bit_length() - 1)
