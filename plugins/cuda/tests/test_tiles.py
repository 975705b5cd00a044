"""Batches of tiles and slices, compared with a loop over single tokens and layers."""

import numpy as np
from blendhub_cuda.records import BLOCKS, COUNT, ORIGIN, POSITION, ROW, SLOT, SOURCE
from blendhub_cuda.tiles import TilePlanner
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.contracts import Segment
from blendhub.core.layout import KVLayout

N_TOKENS = 200


@st.composite
def planners(draw):
    layout = KVLayout(
        layers=draw(st.integers(1, 5)),
        kv_heads=draw(st.integers(1, 4)),
        key_dim=draw(st.integers(1, 64)),
        value_dim=draw(st.integers(0, 64)),
        dtype=draw(st.sampled_from(["int8", "float16", "float32"])),
        chunk_tokens=draw(st.integers(1, 80)),
    )
    block_size = draw(st.integers(1, 20))
    for stream_bytes in (draw(st.integers(256, 2**17)), 2**22):
        planner = TilePlanner(layout, block_size, stream_bytes)
        if planner.staging_bytes >= planner.layer_bytes:
            return planner, block_size
    raise AssertionError("4 MiB are enough for any of these")


@st.composite
def segments(draw, chunk_tokens):
    """Random segments, many of them whole chunks."""
    row = draw(st.sampled_from([0, 0, chunk_tokens // 2]))
    count = draw(st.sampled_from([chunk_tokens - row, 1, chunk_tokens // 3]))
    start = draw(st.integers(0, N_TOKENS - 80))
    return Segment(Span(start, start + count), draw(st.integers(0, 2**30)), row, draw(st.integers(0, 500)))


def tokens_of(planner, block_size, groups):
    """Each token of each layer: its shard, row, block, slot, position and source."""
    layout, found = planner.layout, []
    for group, batch in [(one, batch) for one in groups for batch in one.batches]:
        nbytes = batch.n_layers * planner.layer_bytes
        base = layout.keys_at(batch.first_layer)
        assert group.table.nbytes <= planner.table_bytes and len(batch.tiles)
        assert all(tile[ORIGIN] % group.align == 0 if group.align else tile[ORIGIN] == 0 for tile in group.table)
        for one, next_one in zip(batch.slices, batch.slices[1:], strict=False):
            assert one.staging_at + nbytes <= next_one.staging_at
        assert not batch.slices or batch.slices[-1].staging_at + nbytes <= planner.staging_bytes
        for layer in range(batch.first_layer, batch.first_layer + batch.n_layers):
            for tile in group.table[batch.tiles.start : batch.tiles.stop]:
                assert 0 < tile[COUNT] <= planner.tile_tokens
                at, row, shard = tile[ORIGIN] + layout.keys_at(layer) - base, tile[ROW], tile[ORIGIN]
                if batch.slices:
                    (one,) = [s for s in batch.slices if s.staging_at <= at < s.staging_at + nbytes]
                    assert one.row <= row and row + tile[COUNT] <= one.row + one.count
                    shard = one.at + at - one.staging_at - layout.keys_at(layer)
                for k in range(tile[COUNT]):
                    block, slot = divmod(tile[SLOT] + k, block_size)
                    found.append(
                        (layer, shard, row + k, tile[BLOCKS + block], slot, tile[POSITION] + k, tile[SOURCE] + k)
                    )
    return sorted(tuple(map(int, token)) for token in found)


@given(planners(), st.data(), st.integers(0, 120), st.booleans())
def test_each_token_of_each_layer_lies_in_one_tile(made, data, skipped, stage_partial_chunks):
    planner, block_size = made
    layout = planner.layout
    given_segments = data.draw(st.lists(segments(layout.chunk_tokens), max_size=5))
    block_ids = np.random.default_rng(1).permutation(500)[: -(-N_TOKENS // block_size)]
    groups = list(planner.batch_groups(given_segments, block_ids, skipped, stage_partial_chunks))
    assert tokens_of(planner, block_size, groups) == sorted(
        (
            layer,
            segment.shard,
            segment.row + k,
            int(block_ids[(segment.span.start + k) // block_size]),
            (segment.span.start + k) % block_size,
            segment.span.start + k,
            segment.source_start + k,
        )
        for layer in range(layout.layers)
        for segment in given_segments
        for k in range(len(segment.span))
        if segment.span.start + k >= skipped
    )


@given(planners(), st.integers(0, 100))
def test_skipped_tokens_have_no_tiles(made, skipped):
    """Skipped tokens cost nothing: they have no tile."""
    planner, block_size = made
    count = planner.layout.chunk_tokens
    whole = Segment(Span(0, count), 0, 0, 0)
    block_ids = np.arange(-(-count // block_size))
    batches = [batch for group in planner.batch_groups([whole], block_ids, skipped, False) for batch in group.batches]
    left = max(count - skipped, 0)
    n_tiles = sum(len(batch.tiles) * batch.n_layers for batch in batches)
    assert n_tiles == planner.layout.layers * -(-left // planner.tile_tokens)
    assert all(bool(batch.slices) == (skipped == 0) for batch in batches)
