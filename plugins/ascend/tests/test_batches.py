"""Batches of tokens and slices, compared with a loop over single tokens and layers."""

import numpy as np
import pytest
from blendhub_ascend.batches import ALIGNED_TOKENS, POSITION, SLOT, SOURCE, SPAN_BLOCK, SPAN_COUNT, TokenPlanner
from hypothesis import given
from hypothesis import strategies as st

from blendhub import Span
from blendhub.contracts import Segment
from blendhub.core.layout import KVLayout

N_TOKENS = 400


@st.composite
def planners(draw):
    layout = KVLayout(
        layers=draw(st.integers(1, 5)),
        kv_heads=draw(st.integers(1, 3)),
        key_dim=draw(st.integers(1, 8)),
        value_dim=draw(st.integers(0, 8)),
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        chunk_tokens=draw(st.integers(1, 80)),
    )
    block_size = draw(st.integers(1, 20))
    table_bytes = TokenPlanner(layout, block_size, 0).table_bytes
    staging_bytes = draw(st.integers(layout.keys_at(1), layout.keys_at(layout.layers + 1)))
    return TokenPlanner(layout, block_size, table_bytes + staging_bytes), block_size


@st.composite
def tilings(draw, chunk_tokens):
    """Segments that do not overlap, with holes or without, some of them whole chunks, some of them moved."""
    segments, at = [], draw(st.integers(0, 30))
    for number in range(draw(st.integers(0, 6))):
        row = draw(st.sampled_from([0, 0, chunk_tokens // 2]))
        count = draw(st.sampled_from([chunk_tokens - row, 1, chunk_tokens // 3]))
        count = min(count, N_TOKENS - at)
        source = draw(st.sampled_from([at, at, 0, 500]))
        segments.append(Segment(Span(at, at + count), number * 10**6 + draw(st.integers(0, 9)), row, source))
        at = min(at + count + draw(st.sampled_from([0, 0, 7])), N_TOKENS)
    return segments


def tokens_of(planner, block_size, groups):
    """Each token of each layer: the bytes of its key and value in the arena, its slot in the pages, its positions."""
    layout, found = planner.layout, []
    kinds = [layout.key_row_bytes, layout.value_row_bytes]
    for group, batch in [(one, batch) for one in groups for batch in one.batches]:
        assert group.table.nbytes == planner.table_bytes
        columns = group.table[:, batch.first_column : batch.first_column + batch.n_tokens].tolist()
        assert batch.first_column % ALIGNED_TOKENS == 0 and len(columns[0]) == batch.n_tokens <= layout.chunk_tokens
        slots = [block * block_size + slot + k for block, slot, count in batch.spans for k in range(count)]
        assert columns[SLOT] == slots
        assert all(slot + count <= block_size for _, slot, count in batch.spans)
        assert columns[SPAN_BLOCK][: len(batch.spans)] == [span.block for span in batch.spans]
        assert columns[SPAN_COUNT][: len(batch.spans)] == [span.count for span in batch.spans]
        moved = [new != old for new, old in zip(columns[POSITION], columns[SOURCE], strict=True)]
        assert moved == [batch.moved] * batch.n_tokens
        arena_of = {}
        at = 0
        for one in batch.slices:
            assert one.staging_at == at and one.nbytes > 0
            arena_of |= {at + k: one.at + k for k in range(one.nbytes)}
            at += one.nbytes
        assert at <= planner.staging_bytes
        at = 0
        for layer in range(batch.first_layer, batch.first_layer + batch.n_layers):
            for kind, row_bytes in enumerate(kinds):
                for token in range(batch.n_tokens if row_bytes else 0):
                    places = [arena_of[at + k] for k in range(row_bytes)]
                    assert places == list(range(places[0], places[0] + row_bytes))
                    rest = columns[SLOT][token], columns[POSITION][token], columns[SOURCE][token]
                    found.append((layer, kind, places[0], *rest))
                    at += row_bytes
    return sorted(found)


@given(planners(), st.data(), st.sampled_from([0, 0, 1, 37, 200]))
def test_each_token_of_each_layer_lies_in_one_batch(made, data, skipped):
    """Holes and skipped tokens are in none."""
    planner, block_size = made
    layout = planner.layout
    segments = data.draw(tilings(layout.chunk_tokens))
    block_ids = np.random.default_rng(1).permutation(500)[: -(-N_TOKENS // block_size)]
    groups = list(planner.batch_groups(segments, block_ids, skipped))
    expected = []
    for segment in segments:
        for k in range(len(segment.span)):
            position = segment.span.start + k
            slot = int(block_ids[position // block_size]) * block_size + position % block_size
            if position < skipped:
                continue
            for layer in range(layout.layers):
                for kind, begin, row_bytes in (
                    (0, layout.keys_at(layer), layout.key_row_bytes),
                    (1, layout.values_at(layer), layout.value_row_bytes),
                ):
                    if row_bytes:
                        at = segment.shard + begin + (segment.row + k) * row_bytes
                        expected.append((layer, kind, at, slot, position, segment.source_start + k))
    assert tokens_of(planner, block_size, groups) == sorted(expected)


LAYOUT = KVLayout(layers=4, kv_heads=2, key_dim=16, value_dim=16, dtype="bfloat16", chunk_tokens=64)
BLOCKS = np.arange(60)[::-1].copy()


def groups_of(segments, *, layers=4, skipped=0):
    planner = TokenPlanner(LAYOUT, 16, TokenPlanner(LAYOUT, 16, 0).table_bytes + layers * LAYOUT.keys_at(1))
    return list(planner.batch_groups(segments, BLOCKS, skipped))


def batches_of(segments, **options):
    return [batch for group in groups_of(segments, **options) for batch in group.batches]


def test_a_whole_chunk_is_one_copy():
    (batch,) = batches_of([Segment(Span(5, 69), 0, 0, 5)])
    assert [(one.at, one.nbytes) for one in batch.slices] == [(0, LAYOUT.shard_bytes)]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_chunk_that_staging_cannot_hold_is_split_by_layers(layers):
    batches = batches_of([Segment(Span(0, 64), 0, 0, 0)], layers=layers)
    assert [batch.n_layers for batch in batches] == {1: [1] * 4, 2: [2] * 2, 3: [2] * 2}[layers]
    assert all(len(batch.slices) == 1 for batch in batches)


def test_small_pieces_share_a_batch_and_moved_ones_have_their_own():
    pieces = [Segment(Span(at, at + 5), at * 10**5, 3, at + (100 if at >= 40 else 0)) for at in range(0, 80, 10)]
    assert [(batch.n_tokens, batch.moved) for batch in batches_of(pieces)] == [(20, False), (20, True)]


def test_a_long_transfer_has_several_tables():
    chunks = [Segment(Span(at, at + 1), at * 10**5, 0, at) for at in range(0, 900, 2)]
    planner = TokenPlanner(LAYOUT, 16, 2**20)
    planner.columns = 64
    groups = list(planner.batch_groups(chunks, BLOCKS, 0))
    assert len(groups) > 1 and sum(batch.n_tokens for group in groups for batch in group.batches) == 450
