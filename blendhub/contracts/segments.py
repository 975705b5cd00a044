"""Tokens of a prompt and the places of their KV, and whether a transfer of them stays within its bounds."""

import itertools
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from blendhub.contracts.pages import PagedLayer
from blendhub.core.errors import InvalidInput, Unsupported
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Position, Span


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Tokens ``span`` of a prompt, and the place of their KV in the arena."""

    span: Span
    shard: Position
    """Byte offset in the arena of the group's section of this rank's shard of the chunk, a multiple of the item size;
    with one group, of the shard itself."""
    row: Position
    """The row of the section that holds the span's first token."""
    source_start: Position
    """The position that the span's first key is stored for. Unless it is ``span.start``, the keys are rotated."""


class PageSegment(msgspec.Struct, frozen=True, eq=False):
    """Tokens ``span`` of a prompt, and the blocks of the same group's pages that hold their KV already."""

    span: Span
    blocks: npt.NDArray[np.int64]
    """Blocks whose tokens follow each other."""
    row: Position
    """How many tokens of the blocks stand before the span's first."""
    source_start: Position
    """The position that the span's first key is kept for. Unless it is ``span.start``, the keys are rotated."""

    def blocks_read(self, block_size: int) -> npt.NDArray[np.int64]:
        """Those of the blocks that have tokens of the span."""
        return self.blocks[self.row // block_size : -(-(self.row + len(self.span)) // block_size)]


S = TypeVar("S", bound=Segment | PageSegment)


def after_prefix(segments: Sequence[S], skip_prefix_n_tokens: int) -> list[S]:
    """What is left of the segments from token ``skip_prefix_n_tokens`` on; empty ones are left out."""
    left = []
    for segment in segments:
        start, end = segment.span.start, segment.span.end
        n_skipped = max(skip_prefix_n_tokens - start, 0)
        if start + n_skipped < end:
            row, source = segment.row + n_skipped, segment.source_start + n_skipped
            left.append(replace(segment, span=Span(start + n_skipped, end), row=row, source_start=source))
    return left


class TransferBounds:
    """The limits of segments of one group: shards, arena, block table, pages and rotation tables."""

    def __init__(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        """Raises Unsupported unless all tensors lie on one device."""
        tensors = [tensor for layer in layers for tensor in layer.tensors]
        tables = [layer.rotation.cos_sin for layer in layers if layer.rotation]
        places = {str(tensor.device): tensor.device for tensor in [*tables, *tensors]}
        if len(places) > 1:
            raise Unsupported(f"pages and cos_sin lie on {', '.join(sorted(places))}; they must lie on one device")
        self.layout = layout
        self.place = tensors[0].device
        self._block_size = block_size
        self._n_blocks = min(tensor.shape[0] for tensor in tensors)
        self._n_positions = min(map(len, tables), default=None)

    def check(
        self, segments: Sequence[Segment | PageSegment], block_ids: npt.NDArray[np.int64], arena_bytes: int
    ) -> None:
        """Raise InvalidInput unless each segment stays within its shard, the arena, the block table and the pages."""
        if block_ids.ndim != 1 or block_ids.dtype.kind not in "iu":
            raise InvalidInput(
                f"block_ids must be a flat array of integers, got {block_ids.dtype} of shape {block_ids.shape}"
            )
        chunk_tokens, shard_bytes = self.layout.chunk_tokens, self.layout.shard_bytes
        n_tokens = len(block_ids) * self._block_size
        for segment in segments:
            if isinstance(segment, PageSegment):
                self._check_source(segment)
            elif not 0 <= segment.row <= chunk_tokens - len(segment.span):
                raise InvalidInput(f"{segment} leaves its shard of {chunk_tokens} rows")
            elif not 0 <= segment.shard <= arena_bytes - shard_bytes:
                raise InvalidInput(f"{segment} leaves the arena: shards of {shard_bytes} bytes, {arena_bytes} in all")
            if segment.span.end > n_tokens:
                raise InvalidInput(
                    f"{segment} leaves the block table: {len(block_ids)} blocks of {self._block_size} tokens"
                )
            self._check_blocks(segment, self._written(segment, block_ids))

    def check_load(
        self,
        segments: Sequence[Segment | PageSegment],
        block_ids: npt.NDArray[np.int64],
        skip_prefix_n_tokens: int,
    ) -> None:
        """Raise InvalidInput for overlapping segments, for positions that no rotation table covers, and for blocks that
        are read and written."""
        if skip_prefix_n_tokens < 0:
            raise InvalidInput(f"skip_prefix_n_tokens must be 0 or more, got {skip_prefix_n_tokens}")
        n_positions = self._n_positions
        for segment in segments:
            start, source = segment.span.start, segment.source_start
            last = max(start, source) + len(segment.span)
            if source < 0 or (n_positions is not None and source != start and last > n_positions):
                raise InvalidInput(f"{segment} leaves the positions of the rotation: there are {n_positions}")
        spans = sorted(segment.span for segment in segments if len(segment.span))
        for span, next_span in itertools.pairwise(spans):
            if next_span.start < span.end:
                raise InvalidInput(f"two segments of one load overlap: {span} and {next_span}")
        left = after_prefix(segments, skip_prefix_n_tokens)
        read = [segment.blocks_read(self._block_size) for segment in left if isinstance(segment, PageSegment)]
        if read:
            written = np.concatenate([self._written(segment, block_ids) for segment in left])
            both = np.intersect1d(np.concatenate(read), written)
            if len(both):
                raise InvalidInput(f"blocks {both.tolist()} are both read and written by one load")

    def _check_source(self, segment: PageSegment) -> None:
        if segment.blocks.ndim != 1 or segment.blocks.dtype.kind not in "iu":
            raise InvalidInput(f"{segment} has blocks that are no flat array of integers")
        if not 0 <= segment.row <= len(segment.blocks) * self._block_size - len(segment.span):
            raise InvalidInput(f"{segment} leaves its {len(segment.blocks)} blocks of {self._block_size} tokens")
        self._check_blocks(segment, segment.blocks_read(self._block_size))

    def _check_blocks(self, segment: Segment | PageSegment, used: npt.NDArray[np.int64]) -> None:
        if len(used) and not (used.min() >= 0 and used.max() < self._n_blocks):
            raise InvalidInput(
                f"{segment} leaves the pages: it lies in blocks {used.tolist()}, but there are {self._n_blocks}"
            )

    def _written(self, segment: Segment | PageSegment, block_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The blocks of a segment's tokens in the prompt."""
        return block_ids[segment.span.start // self._block_size : -(-segment.span.end // self._block_size)]
