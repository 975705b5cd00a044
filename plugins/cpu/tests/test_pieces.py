"""Cutting segments at the borders of blocks, beside a twin that looks at one token at a time."""

import numpy as np
from blendhub_cpu.pieces import pieces_of
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.contracts import Segment


def tokens_of(pieces):
    """Where each token lies: its shard and row, block and slot, position and source."""
    return sorted(
        (
            int(piece["shard"]),
            int(piece["row"]) + k,
            int(piece["block"]),
            int(piece["slot"]) + k,
            int(piece["position"]) + k,
            int(piece["source"]) + k,
        )
        for piece in pieces
        for k in range(piece["count"])
    )


@st.composite
def segments(draw):
    start = draw(st.integers(0, 90))
    end = draw(st.integers(start, 100))
    return Segment(Span(start, end), draw(st.integers(0, 2**40)), draw(st.integers(0, 50)), draw(st.integers(0, 500)))


@given(st.lists(segments(), max_size=6), st.integers(1, 20), st.integers(0, 120))
def test_each_token_lies_in_one_piece(given_segments, block_size, skipped):
    block_ids = np.random.default_rng(1).permutation(200)[: -(-100 // block_size)]
    pieces = pieces_of(given_segments, block_ids, block_size, skipped)
    assert tokens_of(pieces) == sorted(
        (
            segment.shard,
            segment.row + k,
            int(block_ids[(segment.span.start + k) // block_size]),
            (segment.span.start + k) % block_size,
            segment.span.start + k,
            segment.source_start + k,
        )
        for segment in given_segments
        for k in range(len(segment.span))
        if segment.span.start + k >= skipped
    )
    assert all(piece["slot"] + piece["count"] <= block_size for piece in pieces)
    assert all(piece["count"] > 0 for piece in pieces)
