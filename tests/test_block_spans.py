"""Splitting segments at block borders, compared with a loop over single tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.contracts import Segment

devices = pytest.importorskip("blendhub.devices", reason="pages are tensors: pip install torch")


def tokens_of(spans):
    """Each token's shard, row, block, slot, position and source."""
    return sorted(
        (
            int(span["shard"]),
            int(span["row"]) + k,
            int(span["block"]),
            int(span["slot"]) + k,
            int(span["position"]) + k,
            int(span["source"]) + k,
        )
        for span in spans
        for k in range(span["count"])
    )


@st.composite
def segments(draw):
    start = draw(st.integers(0, 90))
    end = draw(st.integers(start, 100))
    return Segment(Span(start, end), draw(st.integers(0, 2**40)), draw(st.integers(0, 50)), draw(st.integers(0, 500)))


@given(st.lists(segments(), max_size=6), st.integers(1, 20), st.integers(0, 120))
def test_each_token_lies_in_one_block_span(given_segments, block_size, skipped):
    block_ids = np.random.default_rng(1).permutation(200)[: -(-100 // block_size)]
    spans = devices.split_at_blocks(given_segments, block_ids, block_size, skipped)
    assert tokens_of(spans) == sorted(
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
    assert all(span["slot"] + span["count"] <= block_size for span in spans)
    assert all(span["count"] > 0 for span in spans)
