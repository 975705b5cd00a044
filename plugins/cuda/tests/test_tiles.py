"""Cutting segments into tiles and slices, beside a twin that looks at one token of one layer at a time."""

import numpy as np
from blendhub_cuda.records import BLOCKS, COUNT, ORIGIN, POSITION, ROW, SLOT, SOURCE
from blendhub_cuda.tiles import Cutter
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.contracts import Segment
from blendhub.layout import KVLayout

N_TOKENS = 200


@st.composite
def cutters(draw):
    layout = KVLayout(
        layers=draw(st.integers(1, 5)),
        kv_heads=draw(st.integers(1, 4)),
        key_dim=draw(st.integers(1, 64)),
        value_dim=draw(st.integers(0, 64)),
        dtype=draw(st.sampled_from(["int8", "float16", "float32"])),
        chunk_tokens=draw(st.integers(1, 80)),
    )
    block_size = draw(st.integers(1, 20))
    for lane_bytes in (draw(st.integers(256, 2**17)), 2**22):
        cutter = Cutter(layout, block_size, lane_bytes)
        if cutter.room >= cutter.layer_bytes:
            return cutter, block_size
    raise AssertionError("4 MiB are enough for any of these")


@st.composite
def segments(draw, chunk_tokens):
    """Any, of which many are whole chunks."""
    row = draw(st.sampled_from([0, 0, chunk_tokens // 2]))
    count = draw(st.sampled_from([chunk_tokens - row, 1, chunk_tokens // 3]))
    start = draw(st.integers(0, N_TOKENS - 80))
    return Segment(Span(start, start + count), draw(st.integers(0, 2**30)), row, draw(st.integers(0, 500)))


def tokens_of(cutter, block_size, all_work):
    """Where each token of each layer lies: its shard and row, block and slot, position and source."""
    layout, found = cutter.layout, []
    for work, batch in [(one, batch) for one in all_work for batch in one.batches]:
        nbytes = batch.n_layers * cutter.layer_bytes
        base = layout.keys_at(batch.first_layer)
        assert work.tiles.nbytes <= cutter.table_bytes and len(batch.tiles)
        assert all(tile[ORIGIN] % work.align == 0 if work.align else tile[ORIGIN] == 0 for tile in work.tiles)
        for one, next_one in zip(batch.slices, batch.slices[1:], strict=False):
            assert one.staging_at + nbytes <= next_one.staging_at
        assert not batch.slices or batch.slices[-1].staging_at + nbytes <= cutter.room
        for layer in range(batch.first_layer, batch.first_layer + batch.n_layers):
            for tile in work.tiles[batch.tiles.start : batch.tiles.stop]:
                assert 0 < tile[COUNT] <= cutter.tile_tokens
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


@given(cutters(), st.data(), st.integers(0, 120), st.booleans())
def test_each_token_of_each_layer_lies_in_one_tile(made, data, skipped, stage_parts):
    cutter, block_size = made
    layout = cutter.layout
    given_segments = data.draw(st.lists(segments(layout.chunk_tokens), max_size=5))
    block_ids = np.random.default_rng(1).permutation(500)[: -(-N_TOKENS // block_size)]
    all_work = list(cutter.work(given_segments, block_ids, skipped, stage_parts))
    assert tokens_of(cutter, block_size, all_work) == sorted(
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


@given(cutters(), st.integers(0, 100))
def test_only_what_is_left_of_a_skipped_chunk_has_tiles(made, skipped):
    """What is skipped costs nothing: no program looks at it."""
    cutter, block_size = made
    count = cutter.layout.chunk_tokens
    whole = Segment(Span(0, count), 0, 0, 0)
    block_ids = np.arange(-(-count // block_size))
    batches = [batch for work in cutter.work([whole], block_ids, skipped, False) for batch in work.batches]
    left = max(count - skipped, 0)
    n_tiles = sum(len(batch.tiles) * batch.n_layers for batch in batches)
    assert n_tiles == cutter.layout.layers * -(-left // cutter.tile_tokens)
    assert all(bool(batch.slices) == (skipped == 0) for batch in batches)
