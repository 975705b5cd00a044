"""Plans a transfer: which bytes are copied to staging, and where the tokens in staging belong. Arithmetic without I/O.

Staging holds, layer by layer, the keys of a batch's tokens and then their values, without gaps. So one operator
serves all tokens of a layer, and a whole chunk has the same order in staging as in the arena: one copy brings it.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blendhub.contracts import Segment
from blendhub.core.layout import KVLayout
from blendhub.devices import BatchPlanner, Slice, split_at_blocks

SLOT, POSITION, SOURCE, SPAN_BLOCK, SPAN_COUNT = range(5)
"""Rows of a group's table. The first three have a column for each token, the last two one for each block span."""
TABLE_ROWS = 5
GROUP_TOKENS = 8192
"""The most tokens of one table, unless one chunk has more."""
ALIGNED_TOKENS = 16
"""Each batch's columns begin at a multiple of 64 bytes, as operators that read them with wide accesses want."""


class BlockSpan(NamedTuple):
    """Consecutive tokens of one block."""

    block: int
    slot: int
    count: int


class Batch(NamedTuple):
    """Some layers of tokens that together fit into a stream's staging."""

    first_column: int
    """The column of the group's table at which the tokens begin."""
    n_tokens: int
    spans: tuple[BlockSpan, ...]
    moved: bool
    """Whether the keys are rotated. It is the same for all tokens of a batch."""
    first_layer: int
    n_layers: int
    slices: tuple[Slice, ...]


class BatchGroup(NamedTuple):
    """Batches that share one table, because each copy of a table costs the host time."""

    table: npt.NDArray[np.int32]
    batches: Sequence[Batch]


class _Piece(NamedTuple):
    """Block spans whose rows follow each other in one shard."""

    shard: int
    row: int
    count: int
    position: int
    source: int
    spans: tuple[BlockSpan, ...]

    @property
    def is_moved(self) -> bool:
        return self.position != self.source


class TokenPlanner(BatchPlanner):
    def __init__(self, layout: KVLayout, block_size: int, stream_bytes: int) -> None:
        self.layout = layout
        self.columns = -(-max(GROUP_TOKENS, layout.chunk_tokens) // ALIGNED_TOKENS) * ALIGNED_TOKENS
        self.table_bytes = TABLE_ROWS * 4 * self.columns
        self.staging_bytes = stream_bytes - self.table_bytes
        self._block_size = block_size

    def batch_groups(
        self,
        segments: Iterable[Segment],
        block_ids: npt.NDArray[np.int64],
        skip_prefix_n_tokens: int,
        stage_partial_chunks: bool = True,
    ) -> Iterator[BatchGroup]:
        group: list[list[_Piece]] = []
        columns = 0
        for pieces in self._tokens_at_once(self._pieces(segments, block_ids, skip_prefix_n_tokens)):
            wanted = _aligned(sum(piece.count for piece in pieces))
            if columns + wanted > self.columns:
                yield self._group(group)
                group, columns = [], 0
            group.append(pieces)
            columns += wanted
        if group:
            yield self._group(group)

    def rows_of(self, batch: Batch) -> Sequence[Slice]:
        """All slices of the batch, which have only rows of the segments."""
        return batch.slices

    def _pieces(self, segments: Iterable[Segment], block_ids: npt.NDArray[np.int64], skipped: int) -> Iterator[_Piece]:
        for segment in segments:
            found = split_at_blocks([segment], block_ids, self._block_size, skipped)
            if len(found):
                spans = tuple(BlockSpan(int(one["block"]), int(one["slot"]), int(one["count"])) for one in found)
                shard, row, position, source = (int(found[0][name]) for name in ("shard", "row", "position", "source"))
                yield _Piece(shard, row, int(found["count"].sum()), position, source, spans)

    def _tokens_at_once(self, pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
        """Small pieces together, as many tokens as a chunk has at most; moved ones apart from the others."""
        some: list[_Piece] = []
        for piece in pieces:
            n_tokens = sum(one.count for one in some) + piece.count
            if some and (n_tokens > self.layout.chunk_tokens or piece.is_moved != some[0].is_moved):
                yield some
                some = []
            some.append(piece)
        if some:
            yield some

    def _group(self, parts: Sequence[list[_Piece]]) -> BatchGroup:
        table = np.zeros((TABLE_ROWS, self.columns), np.int32)
        batches: list[Batch] = []
        column = 0
        for pieces in parts:
            spans = tuple(span for piece in pieces for span in piece.spans)
            n_tokens = sum(piece.count for piece in pieces)
            tokens = table[:, column : column + n_tokens]
            tokens[SLOT] = _joined((span.block * self._block_size + span.slot, span.count) for span in spans)
            tokens[POSITION] = _joined((piece.position, piece.count) for piece in pieces)
            tokens[SOURCE] = _joined((piece.source, piece.count) for piece in pieces)
            table[SPAN_BLOCK, column : column + len(spans)] = [span.block for span in spans]
            table[SPAN_COUNT, column : column + len(spans)] = [span.count for span in spans]
            for first, end in self._layer_ranges(n_tokens):
                slices = tuple(self._slices(pieces, first, end))
                batches.append(Batch(column, n_tokens, spans, pieces[0].is_moved, first, end - first, slices))
            column += _aligned(n_tokens)
        return BatchGroup(table, batches)

    def _layer_ranges(self, n_tokens: int) -> Iterator[tuple[int, int]]:
        """About equally many layers at once, as staging allows."""
        layers = self.layout.layers
        n_ranges = -(-layers // (self.staging_bytes // (n_tokens * self._token_bytes)))
        return itertools.pairwise(layers * number // n_ranges for number in range(n_ranges + 1))

    @property
    def _token_bytes(self) -> int:
        """The bytes that one layer keeps of a token."""
        return self.layout.key_row_bytes + self.layout.value_row_bytes

    def _slices(self, pieces: Sequence[_Piece], first: int, end: int) -> Iterator[Slice]:
        """The pieces' rows of these layers, in the order of staging; neighbours in the arena are joined."""
        joined: Slice | None = None
        for one in self._rows(pieces, first, end):
            if joined and joined.at + joined.nbytes == one.at:
                joined = joined._replace(nbytes=joined.nbytes + one.nbytes)
                continue
            if joined:
                yield joined
            joined = one
        if joined:
            yield joined

    def _rows(self, pieces: Sequence[_Piece], first: int, end: int) -> Iterator[Slice]:
        layout, staging_at = self.layout, 0
        for layer in range(first, end):
            for begin, row_bytes in (
                (layout.keys_at(layer), layout.key_row_bytes),
                (layout.values_at(layer), layout.value_row_bytes),
            ):
                for piece in pieces if row_bytes else ():
                    nbytes = piece.count * row_bytes
                    yield Slice(piece.shard + begin + piece.row * row_bytes, staging_at, nbytes)
                    staging_at += nbytes


def _joined(ranges: Iterable[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """All numbers of ranges that are given by their first number and their count."""
    return np.concatenate([np.arange(first, first + count) for first, count in ranges])


def _aligned(n_tokens: int) -> int:
    return -(-n_tokens // ALIGNED_TOKENS) * ALIGNED_TOKENS
