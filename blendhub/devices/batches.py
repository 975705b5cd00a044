"""Plans a transfer: which bytes are copied to staging, and where the tokens in staging belong. Arithmetic without I/O.

Staging holds, layer by layer, the keys of a batch's tokens and then their values, without gaps. So one operator
serves all tokens of a layer, and a whole chunk has the same order in staging as in the arena: one copy brings it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from blendhub.contracts import PageSegment, Segment
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Span

__all__ = ["POSITION", "SLOT", "SOURCE", "SPAN_BLOCK", "SPAN_COUNT", "TABLE_ROWS", "BlockSpan", "Rows"]
"""What plugins import."""

SLOT, POSITION, SOURCE, SPAN_BLOCK, SPAN_COUNT = range(5)
"""Rows of a batch's table. The first three have a column for each token, the last two one for each block span."""
TABLE_ROWS = 5
ALIGNED_TOKENS = 16
"""The rows of a table begin at multiples of 64 bytes, as operators that read them with wide accesses want."""


S = TypeVar("S", Segment, PageSegment)


class Slice(NamedTuple):
    """A range of consecutive bytes of the arena, and its place in staging."""

    at: int
    """Offset in the arena."""
    staging_at: int
    nbytes: int

    @property
    def stored(self) -> slice:
        return slice(self.at, self.at + self.nbytes)

    @property
    def staged(self) -> slice:
        return slice(self.staging_at, self.staging_at + self.nbytes)


class BlockSpan(NamedTuple):
    """Consecutive tokens of one block."""

    block: int
    slot: int
    n_tokens: int


class Rows(NamedTuple):
    """The place of a batch's rows in staging or, if its slices are empty, in the arena."""

    at: int
    """The offset of the batch's first layer."""
    first: int
    """The row of the batch's first token."""
    n_rows: int
    """The rows that each layer has there, of keys and of values."""


class Batch(NamedTuple):
    """The work between two uses of a stream's staging: some layers of tokens that together fit into it."""

    table: npt.NDArray[np.int32]
    """``[TABLE_ROWS, columns]``: the mover needs it in device memory."""
    n_tokens: int
    n_spans: int
    moved: bool
    """Whether the keys are rotated. It is the same for all tokens of a batch."""
    first_layer: int
    n_layers: int
    rows: Rows
    slices: tuple[Slice, ...] = ()
    """The contents of staging, which are rows of the segments only; empty: the mover uses the arena itself, or staging
    with what it has read from ``source``."""
    source: "Batch | None" = None
    """The batch that reads the same tokens from pages into staging; None: the tokens come from the arena."""

    def spans(self, block_size: int) -> list[BlockSpan]:
        """The block spans, for movers that copy block by block."""
        blocks, counts = self.table[SPAN_BLOCK:, : self.n_spans]
        slots = self.table[SLOT, np.cumsum(counts) - counts] % block_size
        return list(map(BlockSpan, blocks.tolist(), slots.tolist(), counts.tolist()))


class BatchPlanner:
    """Splits transfers into batches that each fit into the staging of one stream."""

    def __init__(self, layout: KVLayout, block_size: int, stream_bytes: int, longest: int | None = None) -> None:
        """``longest``: the most tokens that a chunk of any group of layers has; None: this is the only group."""
        self.layout = layout
        self.table_bytes = 2 * -(-TABLE_ROWS * 4 * _columns(longest or layout.chunk_tokens) // 256) * 256
        """Device memory of a stream for the table of a batch, and as much for that of its source."""
        self.staging_bytes = stream_bytes - self.table_bytes
        """Device memory of a stream for the slices of a batch: at least ``layer_bytes``."""
        self.layer_bytes = layout.keys_at(1)
        """The bytes that one layer keeps of a chunk."""
        self._block_size = block_size

    def batches(
        self,
        segments: Iterable[Segment | PageSegment],
        block_ids: npt.NDArray[np.int64],
        reaches: Callable[[int], bool] = lambda shard: False,
    ) -> Iterator[Batch]:
        """The batches of the segments' tokens. No segment is empty.

        Parts of the chunks whose shard the mover ``reaches`` are left in the arena, because their rows are scattered
        there: they would take two copies a layer.
        """
        reached: list[list[Segment]] = []
        staged: list[Segment] = []
        copied: list[PageSegment] = []
        for piece in segments:
            if isinstance(piece, PageSegment):
                copied += self._in_chunks(piece)
            elif len(piece.span) < self.layout.chunk_tokens and reaches(piece.shard):
                reached.append([piece])
            else:
                staged.append(piece)
        groups = self._together(staged)
        batches = self._batches_of([*reached, *groups], block_ids)
        for (piece,), batch in zip(reached, batches, strict=False):
            rows = Rows(piece.shard, piece.row, self.layout.chunk_tokens)
            yield batch._replace(n_layers=self.layout.layers, rows=rows)
        for pieces, batch in zip(groups, batches, strict=True):
            for first, end in self._layer_ranges(batch.n_tokens):
                slices = tuple(self._slices(pieces, first, end))
                yield batch._replace(first_layer=first, n_layers=end - first, slices=slices)
        yield from self._page_batches(self._together(copied), block_ids)

    def _page_batches(
        self, groups: Sequence[Sequence[PageSegment]], block_ids: npt.NDArray[np.int64]
    ) -> Iterator[Batch]:
        """Batches that are read from pages."""
        read, tables, n_blocks = [], [np.empty(0, np.int64)], 0
        for pieces in groups:
            read.append(list[Segment]())
            for piece in pieces:
                # As if all blocks that are read were one table.
                start = n_blocks * self._block_size + piece.row
                read[-1].append(Segment(Span(start, start + len(piece.span)), 0, 0, start))
                tables.append(piece.blocks)
                n_blocks += len(piece.blocks)
        sources = self._batches_of(read, np.concatenate(tables))
        for batch, source in zip(self._batches_of(groups, block_ids), sources, strict=True):
            for first, end in self._layer_ranges(batch.n_tokens):
                of_layers = source._replace(first_layer=first, n_layers=end - first)
                yield batch._replace(first_layer=first, n_layers=end - first, source=of_layers)

    def _in_chunks(self, piece: PageSegment) -> Iterator[PageSegment]:
        """The tokens of a piece, as many at a time as a table has columns."""
        for at in range(0, len(piece.span), self.layout.chunk_tokens):
            start = piece.span.start + at
            span = Span(start, min(start + self.layout.chunk_tokens, piece.span.end))
            yield replace(piece, span=span, row=piece.row + at, source_start=piece.source_start + at)

    def _together(self, pieces: Iterable[S]) -> list[list[S]]:
        """Small pieces together, as many tokens as a chunk has at most; moved ones apart from the others."""
        groups: list[list[S]] = []
        n_tokens = 0
        for piece in pieces:
            n_tokens += len(piece.span)
            if not groups or n_tokens > self.layout.chunk_tokens or _is_moved(piece) != _is_moved(groups[-1][0]):
                groups.append([])
                n_tokens = len(piece.span)
            groups[-1].append(piece)
        return groups

    def _layer_ranges(self, n_tokens: int) -> Iterator[tuple[int, int]]:
        """The layers that staging holds at once of so many tokens: about equally many each time."""
        layers, token_bytes = self.layout.layers, self.layout.key_row_bytes + self.layout.value_row_bytes
        n_parts = -(-layers // (self.staging_bytes // (n_tokens * token_bytes)))
        return itertools.pairwise(layers * number // n_parts for number in range(n_parts + 1))

    def _batches_of(
        self, groups: Sequence[Sequence[Segment | PageSegment]], block_ids: npt.NDArray[np.int64]
    ) -> Iterator[Batch]:
        """A batch of each group of pieces, without layers and slices. NumPy computes the tables of all together."""
        pieces = [(piece.span.start, piece.source_start, len(piece.span)) for group in groups for piece in group]
        starts, sources, counts = np.array(pieces, np.int64).reshape(-1, 3).T
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        positions = np.repeat(starts, counts) + within
        numbers, slots = np.divmod(positions, self._block_size)
        blocks = block_ids[numbers].astype(np.int64)
        tokens = np.stack([blocks * self._block_size + slots, positions, np.repeat(sources, counts) + within])
        firsts = np.flatnonzero((within == 0) | (slots == 0))
        spans = np.stack([blocks[firsts], np.diff(firsts, append=len(within))])
        ends = list(itertools.accumulate(sum(len(piece.span) for piece in group) for group in groups))
        first = first_span = 0
        for group, end, end_span in zip(groups, ends, np.searchsorted(firsts, ends).tolist(), strict=True):
            n_tokens, n_spans = end - first, end_span - first_span
            table = np.zeros((TABLE_ROWS, _columns(n_tokens)), np.int32)
            table[:SPAN_BLOCK, :n_tokens] = tokens[:, first:end]
            table[SPAN_BLOCK:, :n_spans] = spans[:, first_span:end_span]
            yield Batch(table, n_tokens, n_spans, _is_moved(group[0]), 0, 0, Rows(0, 0, n_tokens))
            first, first_span = end, end_span

    def _slices(self, pieces: Sequence[Segment], first: int, end: int) -> Iterator[Slice]:
        """The pieces' rows of these layers, in the order of staging."""
        layout, staging_at = self.layout, 0
        if len(pieces[0].span) == layout.chunk_tokens:
            yield Slice(pieces[0].shard + layout.keys_at(first), 0, layout.keys_at(end - first))
            return
        for layer in range(first, end):
            for begin, row_bytes in (
                (layout.keys_at(layer), layout.key_row_bytes),
                (layout.values_at(layer), layout.value_row_bytes),
            ):
                for piece in pieces if row_bytes else ():
                    nbytes = len(piece.span) * row_bytes
                    yield Slice(piece.shard + begin + piece.row * row_bytes, staging_at, nbytes)
                    staging_at += nbytes


def _is_moved(piece: Segment | PageSegment) -> bool:
    return piece.span.start != piece.source_start


def _columns(n_tokens: int) -> int:
    return -(-n_tokens // ALIGNED_TOKENS) * ALIGNED_TOKENS
