"""Splits segments at block borders: arithmetic without I/O."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from blendhub.contracts import Segment

BLOCK_SPAN_RECORD = np.dtype(
    [
        ("shard", np.int64),  # offset in the arena
        ("row", np.int64),
        ("count", np.int64),  # tokens, all of one block
        ("block", np.int64),
        ("slot", np.int64),  # of the first token in the block
        ("position", np.int64),
        ("source", np.int64),  # the position that its first key is stored for
    ]
)


def after_prefix(segments: Iterable[Segment], skip_prefix_n_tokens: int) -> npt.NDArray[np.int64]:
    """What is left of the segments from token ``skip_prefix_n_tokens`` on, in rows ``start, end, shard, row, source``;
    segments that end before it are left out."""
    rows = [(s.span.start, s.span.end, s.shard, s.row, s.source_start) for s in segments]
    left = np.array(rows, np.int64).reshape(-1, 5)
    n_skipped = np.maximum(skip_prefix_n_tokens - left[:, 0], 0)
    left[:, [0, 3, 4]] += n_skipped[:, None]
    return left[left[:, 0] < left[:, 1]]


def split_at_blocks(
    segments: Sequence[Segment], block_ids: npt.NDArray[np.int64], block_size: int, skip_prefix_n_tokens: int = 0
) -> npt.NDArray[Any]:
    """The segments' tokens from ``skip_prefix_n_tokens`` on, one record for each range of tokens within a block."""
    start, end, shard, row, source = after_prefix(segments, skip_prefix_n_tokens).T
    first_block = start // block_size
    n_blocks = (end - 1) // block_size + 1 - first_block
    owner = np.repeat(np.arange(len(start)), n_blocks)
    # Counts from 0 within each segment.
    ordinal = np.arange(len(owner)) - np.repeat(np.cumsum(n_blocks) - n_blocks, n_blocks)
    block = np.repeat(first_block, n_blocks) + ordinal
    position = np.maximum(block * block_size, start[owner])
    n_before = position - start[owner]

    spans = np.empty(len(owner), BLOCK_SPAN_RECORD)
    spans["shard"] = shard[owner]
    spans["row"] = row[owner] + n_before
    spans["count"] = np.minimum((block + 1) * block_size, end[owner]) - position
    spans["block"] = block_ids[block]
    spans["slot"] = position - block * block_size
    spans["position"] = position
    spans["source"] = source[owner] + n_before
    return spans
