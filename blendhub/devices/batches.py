"""Plans a transfer: which bytes are copied to staging, and where the tokens in staging belong. Arithmetic without I/O.

Staging holds, layer by layer, the keys of a batch's tokens and then their values, without gaps. So one operator
serves all tokens of a layer, and a whole chunk has the same order in staging as in the arena: one copy brings it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blendhub.contracts import Segment
from blendhub.core.layout import KVLayout

SLOT, POSITION, SOURCE, SPAN_BLOCK, SPAN_COUNT = range(5)
"""Rows of a batch's table. The first three have a column for each token, the last two one for each block span."""
TABLE_ROWS = 5
ALIGNED_TOKENS = 16
"""The rows of a table begin at multiples of 64 bytes, as operators that read them with wide accesses want."""


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
    spans: tuple[BlockSpan, ...]
    moved: bool
    """Whether the keys are rotated. It is the same for all tokens of a batch."""
    first_layer: int
    n_layers: int
    rows: Rows
    slices: tuple[Slice, ...] = ()
    """The contents of staging, which are rows of the segments only; empty: the mover uses the arena itself."""


class BatchPlanner:
    """Splits transfers into batches that each fit into the staging of one stream."""

    def __init__(self, layout: KVLayout, block_size: int, stream_bytes: int, longest: int | None = None) -> None:
        """``longest``: the most tokens that a chunk of any group of layers has; None: this is the only group."""
        self.layout = layout
        self.table_bytes = -(-TABLE_ROWS * 4 * _columns(longest or layout.chunk_tokens) // 256) * 256
        """Device memory of a stream for the table of a batch."""
        self.staging_bytes = stream_bytes - self.table_bytes
        """Device memory of a stream for the slices of a batch: at least ``layer_bytes``."""
        self.layer_bytes = layout.keys_at(1)
        """The bytes that one layer keeps of a chunk."""
        self._block_size = block_size

    def batches(
        self,
        segments: Iterable[Segment],
        block_ids: npt.NDArray[np.int64],
        reaches: Callable[[int], bool] = lambda shard: False,
    ) -> Iterator[Batch]:
        """The batches of the segments' tokens. No segment is empty.

        Parts of the chunks whose shard the mover ``reaches`` are left in the arena, because their rows are scattered
        there: they would take two copies a layer.
        """
        chunk_tokens, layers = self.layout.chunk_tokens, self.layout.layers
        staged: list[Segment] = []
        n_tokens = 0
        for piece in segments:
            if len(piece.span) < chunk_tokens and reaches(piece.shard):
                rows = Rows(piece.shard, piece.row, chunk_tokens)
                yield self._batch([piece], block_ids)._replace(n_layers=layers, rows=rows)
                continue
            # Small pieces together, as many tokens as a chunk has at most; moved ones apart from the others.
            if staged and (n_tokens + len(piece.span) > chunk_tokens or _is_moved(piece) != _is_moved(staged[0])):
                yield from self._staged(staged, block_ids)
                staged, n_tokens = [], 0
            staged.append(piece)
            n_tokens += len(piece.span)
        if staged:
            yield from self._staged(staged, block_ids)

    def _staged(self, pieces: Sequence[Segment], block_ids: npt.NDArray[np.int64]) -> Iterator[Batch]:
        """About equally many layers at once, as staging allows."""
        whole, layers = self._batch(pieces, block_ids), self.layout.layers
        token_bytes = self.layout.key_row_bytes + self.layout.value_row_bytes
        n_batches = -(-layers // (self.staging_bytes // (whole.n_tokens * token_bytes)))
        for first, end in itertools.pairwise(layers * number // n_batches for number in range(n_batches + 1)):
            slices = tuple(self._slices(pieces, first, end))
            yield whole._replace(first_layer=first, n_layers=end - first, slices=slices)

    def _batch(self, pieces: Sequence[Segment], block_ids: npt.NDArray[np.int64]) -> Batch:
        """The pieces' tokens, without layers and slices."""
        spans = tuple(span for piece in pieces for span in self._spans(piece, block_ids))
        n_tokens = sum(len(piece.span) for piece in pieces)
        table = np.zeros((TABLE_ROWS, _columns(n_tokens)), np.int32)
        table[SLOT, :n_tokens] = _joined((span.block * self._block_size + span.slot, span.n_tokens) for span in spans)
        table[POSITION, :n_tokens] = _joined((piece.span.start, len(piece.span)) for piece in pieces)
        table[SOURCE, :n_tokens] = _joined((piece.source_start, len(piece.span)) for piece in pieces)
        table[SPAN_BLOCK, : len(spans)] = [span.block for span in spans]
        table[SPAN_COUNT, : len(spans)] = [span.n_tokens for span in spans]
        return Batch(table, n_tokens, spans, _is_moved(pieces[0]), 0, 0, Rows(0, 0, n_tokens))

    def _spans(self, piece: Segment, block_ids: npt.NDArray[np.int64]) -> Iterator[BlockSpan]:
        at, size = piece.span.start, self._block_size
        while at < piece.span.end:
            number, slot = divmod(at, size)
            count = min(size - slot, piece.span.end - at)
            yield BlockSpan(int(block_ids[number]), slot, count)
            at += count

    def _slices(self, pieces: Sequence[Segment], first: int, end: int) -> Iterator[Slice]:
        """The pieces' rows of these layers, in the order of staging; neighbours in the arena are joined."""
        joined: Slice | None = None
        for piece in self._rows(pieces, first, end):
            if joined and joined.at + joined.nbytes == piece.at:
                joined = joined._replace(nbytes=joined.nbytes + piece.nbytes)
                continue
            if joined:
                yield joined
            joined = piece
        if joined:
            yield joined

    def _rows(self, pieces: Sequence[Segment], first: int, end: int) -> Iterator[Slice]:
        layout, staging_at = self.layout, 0
        for layer in range(first, end):
            for begin, row_bytes in (
                (layout.keys_at(layer), layout.key_row_bytes),
                (layout.values_at(layer), layout.value_row_bytes),
            ):
                for piece in pieces if row_bytes else ():
                    nbytes = len(piece.span) * row_bytes
                    yield Slice(piece.shard + begin + piece.row * row_bytes, staging_at, nbytes)
                    staging_at += nbytes


def _is_moved(piece: Segment) -> bool:
    return piece.span.start != piece.source_start


def _joined(ranges: Iterable[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """All numbers of ranges that are given by their first number and their count."""
    return np.concatenate([np.arange(first, first + count) for first, count in ranges])


def _columns(n_tokens: int) -> int:
    return -(-n_tokens // ALIGNED_TOKENS) * ALIGNED_TOKENS
