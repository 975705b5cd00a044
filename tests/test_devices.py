"""What ``Device`` checks for every device, beyond what the suite requires of any; and batches of tokens and slices,
compared with a loop over single tokens."""

from cProfile import Profile
from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="pages are tensors: pip install torch")

import torch
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from blendhub.contracts import PagedLayer, Rotation, Segment
from blendhub.contracts.segments import after_prefix
from blendhub.core.errors import BrokenContract, InvalidInput, LayoutMismatch, Unsupported
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Span
from blendhub.devices import batches, read_pages
from blendhub.testing.devices.device_harness import DeviceSetup, Rotary

SETUP = DeviceSetup()
BLOCK, LAYOUT = SETUP.block_size, SETUP.layout()
PAGES = torch.zeros(SETUP.n_blocks, SETUP.kv_heads, BLOCK, SETUP.key_dim + SETUP.value_dim)
GAPS = torch.zeros(SETUP.n_blocks, 3, 24, 8).transpose(2, 3)


class FewPages(CpuDevice):
    formats = ("packed_heads", "split")
    dtypes = ("float32", "int8")

    def __init__(self):
        super().__init__(CpuOptions())


def layer(pages=PAGES, rotation=None, format="packed_heads"):
    return PagedLayer("layer", format, (pages,), rotation)


def table(width, offset=0, **how):
    return layer(rotation=Rotation(torch.zeros(100, width, **how), True, offset))


BYTES = PAGES.to(torch.int8)


PAIR = [layer()] * 2
REFUSED: list[tuple[Any, int, str, type[Exception], str]] = [
    ([layer(), table(8, -1)], BLOCK, "float32", LayoutMismatch, "cos_sin of shape"),
    ([layer(), table(7)], BLOCK, "float32", LayoutMismatch, "cos_sin of shape"),
    ([layer(), table(14)], BLOCK, "float32", LayoutMismatch, "cos_sin of shape"),
    ([layer(), table(8, dtype=torch.float64)], BLOCK, "float32", Unsupported, "must be float32"),
    ([layer(), table(8, device="meta")], BLOCK, "float32", Unsupported, "lie on cpu, meta"),
    ([layer(), layer(GAPS)], BLOCK, "float32", Unsupported, "the last one must be 1"),
    ([layer(format="packed_tiles")] * 2, BLOCK, "float32", Unsupported, "'packed_tiles'.*supports packed_heads"),
    ([layer(BYTES), layer(BYTES, Rotary().build())], BLOCK, "int8", Unsupported, "cannot be rotated"),
    (PAIR, BLOCK, "bfloat16", Unsupported, "of bfloat16; it supports float32, int8: leave out --kv-cache"),
    (PAIR, 0, "float32", LayoutMismatch, "block_size 0"),
]


@pytest.mark.parametrize("layers, block_size, dtype, error, words", REFUSED)
def test_pages_that_no_device_takes(layers, block_size, dtype, error, words):
    with pytest.raises(error, match=words):
        FewPages().attach(layers, block_size, replace(LAYOUT, dtype=dtype))


def test_groups_lie_on_one_device_and_copies_stay_within_them():
    """And what is no transfer names the device."""

    class Forgetful(FewPages):
        def _save(self, *_):
            return None

    device, segments, block_ids = Forgetful(), [Segment(Span(0, 5), 0, 0, 0)], np.arange(5)
    device.attach(PAIR, BLOCK, LAYOUT)
    with pytest.raises(Unsupported, match="lie on meta and on cpu"):
        device.attach([layer(PAGES.to("meta"))] * 2, BLOCK, LAYOUT)
    device.pin(np.zeros(LAYOUT.shard_bytes, np.uint8))
    with pytest.raises(InvalidInput, match="skip_prefix_n_tokens"):
        device.load(segments, block_ids, -1)
    tables: list[Any] = [np.zeros(5), np.zeros((5, 1), np.int64)]
    for table in tables:
        with pytest.raises(InvalidInput, match="flat array of integers"):
            device.save(segments, table)
    with pytest.raises(BrokenContract, match="Forgetful should return a Transfer for a copy, got None"):
        device.save(segments, block_ids)


def test_layers_that_share_a_table_share_its_contiguous_copy():
    layers = [layer(rotation=Rotation(wide := torch.ones(100, 20)[:, :8], True)), layer(rotation=Rotation(wide, False))]
    first, second = (one.rotation.cos_sin for one in read_pages(layers, BLOCK, LAYOUT).layers)
    assert first is second and first.is_contiguous()


N_TOKENS = 400
REACHED = 3 * 10**6
"""Shards from here on are those that kernels reach."""


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
    table_bytes = batches.BatchPlanner(layout, block_size, 0).table_bytes
    staging_bytes = draw(st.integers(layout.keys_at(1), layout.keys_at(layout.layers + 1)))
    return batches.BatchPlanner(layout, block_size, table_bytes + staging_bytes), block_size


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


def tokens_of(planner, block_size, made):
    """Each token of each layer: the bytes of its key and value in the arena, its slot in the pages, its positions."""
    layout, found = planner.layout, []
    kinds = [layout.key_row_bytes, layout.value_row_bytes]
    for batch in made:
        assert batch.table.nbytes <= planner.table_bytes and batch.table.strides[0] % 64 == 0
        assert 0 < batch.n_tokens <= layout.chunk_tokens
        columns = batch.table[:, : batch.n_tokens].tolist()
        spans = batch.spans(block_size)
        slots = [block * block_size + slot + k for block, slot, count in spans for k in range(count)]
        assert columns[batches.SLOT] == slots
        assert all(slot + count <= block_size for _, slot, count in spans)
        assert columns[batches.SPAN_BLOCK][: len(spans)] == [span.block for span in spans]
        assert columns[batches.SPAN_COUNT][: len(spans)] == [span.n_tokens for span in spans]
        moved = [new != old for new, old in zip(columns[batches.POSITION], columns[batches.SOURCE], strict=True)]
        assert moved == [batch.moved] * batch.n_tokens
        arena_of = {}
        for piece in batch.slices:
            assert piece.staging_at == len(arena_of) and piece.nbytes > 0
            arena_of |= {piece.staging_at + k: piece.at + k for k in range(piece.nbytes)}
        assert len(arena_of) <= planner.staging_bytes
        at = batch.rows.at
        for layer in range(batch.first_layer, batch.first_layer + batch.n_layers):
            for kind, row_bytes in enumerate(kinds):
                for token in range(batch.n_tokens if row_bytes else 0):
                    first = at + (batch.rows.first + token) * row_bytes
                    places = [arena_of[first + k] if batch.slices else first + k for k in range(row_bytes)]
                    assert places == list(range(places[0], places[0] + row_bytes))
                    rest = (columns[row][token] for row in (batches.SLOT, batches.POSITION, batches.SOURCE))
                    found.append((layer, kind, places[0], *rest))
                at += batch.rows.n_rows * row_bytes
    return sorted(found)


@given(planners(), st.data(), st.sampled_from([0, 0, 1, 37, 200]), st.booleans())
def test_each_token_of_each_layer_lies_in_one_batch(made, data, skipped, some_are_reached):
    """Holes and skipped tokens are in none."""
    planner, block_size = made
    layout = planner.layout
    segments = data.draw(tilings(layout.chunk_tokens))
    block_ids = np.random.default_rng(1).permutation(500)[: -(-N_TOKENS // block_size)]
    planned = list(
        planner.batches(after_prefix(segments, skipped), block_ids, lambda shard: some_are_reached and shard >= REACHED)
    )
    if some_are_reached:
        parts = [batch for batch in planned if not batch.slices]
        assert all(batch.rows.at >= REACHED and batch.n_tokens < layout.chunk_tokens for batch in parts)
    kinds = (layout.keys_at, layout.key_row_bytes), (layout.values_at, layout.value_row_bytes)
    expected = []
    for segment in segments:
        for position in range(max(segment.span.start, skipped), segment.span.end):
            n_before = position - segment.span.start
            slot = int(block_ids[position // block_size]) * block_size + position % block_size
            for layer, (kind, (begin, row_bytes)) in product(range(layout.layers), enumerate(kinds)):
                if row_bytes:
                    at = segment.shard + begin(layer) + (segment.row + n_before) * row_bytes
                    expected.append((layer, kind, at, slot, position, segment.source_start + n_before))
    assert tokens_of(planner, block_size, planned) == sorted(expected)


def test_a_long_prompt_takes_few_calls_of_the_interpreter_a_gib():
    """32,768 tokens of Llama 3.1 8B; a batch takes a copy of its table, a copy for each slice, and a launch."""
    options = pytest.importorskip("blendhub_cuda", reason="pip install 'blendhub[cuda]'").CudaOptions()
    layout = KVLayout(layers=32, kv_heads=8, key_dim=128, value_dim=128, dtype="bfloat16", chunk_tokens=256)
    planner = batches.BatchPlanner(layout, 16, int(options.staging_mib * 2**20) // 4)
    starts, gib = range(0, 32_768, 256), 128 * layout.shard_bytes / 2**30
    chunks = [Segment(Span(at, at + 256), at // 256 * layout.shard_bytes, 0, at + 1000) for at in starts]
    with Profile(builtins=False) as profile:
        made = list(planner.batches(chunks, np.arange(2048)))
    # The interpreter that plans is that which submits other transfers and the engine's steps.
    assert sum(entry.callcount for entry in profile.getstats()) / len(chunks) <= 40
    assert len(made) / gib <= 32
    assert sum(2 + len(batch.slices) for batch in made) / gib <= 96
    pieces = [Segment(Span(at, at + 5), at * layout.shard_bytes, 3, at + 1000 * (at >= 40)) for at in range(0, 80, 10)]
    assert [(batch.n_tokens, batch.moved) for batch in planner.batches(pieces, np.arange(5))] == [(20, 0), (20, 1)]
