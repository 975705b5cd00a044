"""Loads and saves of models with several block tables, against copies made token by token."""

from itertools import product

import numpy as np
import pytest
import torch
from blendhub_cpu import CpuOptions
from blendhub_cpu.device import CpuDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from blendhub import Span
from blendhub.contracts import PagedLayer, PageSegment, Segment
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout, section_starts, shard_bytes_of
from blendhub.vllm.model import layer_groups
from blendhub.vllm.model.layer_groups import LayerGroup, split
from blendhub.vllm.model.pages import state_bytes
from blendhub.vllm.worker.layer_copies import LayerCopies, Transfers
from tests.stand_in import Anything, StandIn

N_BLOCKS, CHUNK, N_CHUNKS = 40, 12, 6


@st.composite
def groups_of_layers(draw):
    """Groups whose layers follow each other in turn, as far as each has some."""
    groups, n_tables = [], draw(st.integers(1, 3))
    for table in range(n_tables):
        heads, width, layers = draw(st.integers(1, 2)), draw(st.sampled_from([2, 4])), draw(st.integers(1, 3))
        shape = {"layers": layers, "kv_heads": heads, "key_dim": width, "value_dim": width}
        layout = KVLayout(**shape, dtype="float32", chunk_tokens=CHUNK)
        page = draw(st.sampled_from([2, 4]))
        block = page * draw(st.integers(1, 2))
        at = shard_bytes_of([*(group.layout for group in groups), layout]) - layout.shard_bytes
        numbers = tuple(range(table, layers * n_tables, n_tables))
        groups.append(LayerGroup(table, numbers, layout, block, page, "packed_heads", at))
    return groups


@settings(max_examples=60, deadline=None)
@given(groups_of_layers(), st.integers(0, 9), st.data())
def test_a_window_s_layers_are_written_where_vllm_has_blocks_and_nowhere_else_and_saved_again(groups, n_probed, data):
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    device, pages = CpuDevice(CpuOptions()), []
    for group in groups:
        layout, n_pages = group.layout, N_BLOCKS * group.block_size // group.page_size
        shape = n_pages, layout.kv_heads, group.page_size, layout.key_dim + layout.value_dim
        pages.append([torch.from_numpy(random.normal(size=shape).astype(np.float32)) for _ in group.layers])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_groups, "LEAST_BYTES", 0)
        split_groups = split(groups, n_probed)
    for group in split_groups:
        first = groups[group.table].layers.index(group.layers[0])
        of_group = pages[group.table][first : first + len(group.layers)]
        paged = [PagedLayer("layer", "packed_heads", (part,)) for part in of_group]
        device.attach(paged, group.page_size, group.layout)
        assert {layer < n_probed for layer in group.layers} == {group.is_probed}
    order = [group.is_probed for group in split_groups]
    assert order == sorted(order, reverse=True), "layers that probes read are copied first"
    copies, shard_bytes = LayerCopies(device, split_groups), shard_bytes_of([group.layout for group in groups])
    arena = random.integers(0, 100, N_CHUNKS * shard_bytes).astype(np.float32).view(np.uint8)
    device.pin(arena)
    n = data.draw(st.integers(1, N_CHUNKS * CHUNK))
    skipped, tables, expected = data.draw(st.integers(0, n)), [], [[part.clone() for part in parts] for parts in pages]
    chunks = [Span(at, min(at + CHUNK, n)) for at in range(0, n, CHUNK)]
    segments = [Segment(chunk, number * shard_bytes, 0, chunk.start) for number, chunk in enumerate(chunks)]
    starts = section_starts([group.layout for group in groups])
    for group, parts, start in zip(groups, expected, starts, strict=True):
        blocks = 1 + random.permutation(N_BLOCKS - 1)[: -(-n // group.block_size)]
        freed = data.draw(st.integers(0, len(blocks)))
        blocks[:freed] = 0
        tables.append(blocks)
        for position in range(max(skipped, freed * group.block_size), n):
            block, within = int(blocks[position // group.block_size]), position % group.block_size
            page, slot = divmod(block * group.block_size + within, group.page_size)
            for layer, part in enumerate(parts):
                row = row_of(arena, group, shard_bytes, start, layer, position)
                part[page, :, slot] = torch.from_numpy(row)
    copies.load(segments, tables, skipped).all.wait()
    for parts, others in zip(pages, expected, strict=True):
        assert all(part.equal(other) for part, other in zip(parts, others, strict=True))
    if not skipped and all(blocks.all() for blocks in tables):
        kept, arena[:] = arena.copy(), 0
        copies.save(segments, tables).wait()
        for group, start in zip(groups, starts, strict=True):
            for layer, position in product(range(len(group.layers)), range(n)):
                place = group, shard_bytes, start, layer, position
                assert np.array_equal(row_of(arena, *place), row_of(kept, *place))


def test_a_table_s_layers_copy_what_its_other_blocks_have_and_load_the_rest():
    """Blocks of four tokens are kept in pages of two."""
    random, device, pages = np.random.default_rng(1), CpuDevice(CpuOptions()), []
    layout = KVLayout(layers=1, kv_heads=1, key_dim=2, value_dim=2, dtype="float32", chunk_tokens=CHUNK)
    groups = [
        LayerGroup(table, (table,), layout, 4, page_size, "packed_heads", table * layout.shard_bytes)
        for table, page_size in enumerate((2, 4))
    ]
    for group in groups:
        shape = N_BLOCKS * 4 // group.page_size, 1, group.page_size, 4
        pages.append(torch.from_numpy(random.normal(size=shape).astype(np.float32)))
        device.attach([PagedLayer("layer", "packed_heads", (pages[-1],))], group.page_size, layout)
    arena = random.integers(0, 100, 2 * 2 * layout.shard_bytes).astype(np.float32).view(np.uint8)
    device.pin(arena)
    expected = [part.flatten(0, 2).clone() for part in pages]
    segments = [
        Segment(Span(at, at + CHUNK), 2 * number * layout.shard_bytes, 0, at) for number, at in ((0, 0), (1, 12))
    ]
    donors = [PageSegment(Span(5, 14), np.array([30, 9, 31]), 3, 5)], [PageSegment(Span(20, 24), np.array([33]), 0, 20)]
    tables = [np.arange(1, 7), np.arange(11, 17)]
    for group, table, rows, (donor,) in zip(groups, tables, expected, donors, strict=True):
        for position in range(2 * CHUNK):
            block, slot = table[position // 4], position % 4
            if position in range(donor.span.start, donor.span.end):
                at, within = divmod(donor.row + position - donor.span.start, 4)
                row = rows[donor.blocks[at] * 4 + within]
            else:
                row = row_of(arena, group, 2 * layout.shard_bytes, group.at, 0, position)[0]
            rows[block * 4 + slot] = torch.as_tensor(row)
    LayerCopies(device, groups).load(segments, tables, 0, None, donors).all.wait()
    assert all(part.flatten(0, 2).equal(rows) for part, rows in zip(pages, expected, strict=True))


def row_of(arena, group, shard_bytes, start, layer, position):
    """A token's keys and values ``[heads, width]`` in the arena."""
    layout, (chunk, row) = group.layout, divmod(position, CHUNK)
    both = []
    for at, size in ((layout.keys_at(layer), layout.key_row_bytes), (layout.values_at(layer), layout.value_row_bytes)):
        begin = chunk * shard_bytes + start + at + row * size
        both.append(arena[begin : begin + size].view(np.float32).reshape(layout.kv_heads, -1))
    return np.concatenate(both, -1)


def test_states_that_lie_otherwise_are_refused():
    """In blocks of vLLM, the two parts of a state follow each other, with room behind them."""
    raw, shapes = torch.zeros(4, 200, dtype=torch.uint8), ((3, 8), (4, 4))
    first = raw[:, :48].view(torch.bfloat16).unflatten(1, shapes[0])
    second, behind_a_gap = (raw[:, at : at + 64].view(torch.float32).unflatten(1, shapes[1]) for at in (48, 64))
    state_bytes("a", [first, second], shapes)
    refused = [
        ([second, first], "of the shapes"),
        ([first, behind_a_gap], "do not follow"),
        ([first, second.clone()], ""),
    ]
    for parts, why in refused:
        with pytest.raises(Unsupported, match=f"a keeps its state in tensors .*{why}"):
            state_bytes("a", parts, shapes)


class Failing(Anything):
    is_waited_for = False

    def wait(self):
        self.is_waited_for = True
        raise RuntimeError("out of memory")


def test_a_copy_that_fails_in_one_group_ends_when_all_have_ended():
    parts = [Failing(), Failing()]
    with pytest.raises(RuntimeError, match="out of memory"):
        Transfers(parts).wait()
    assert all(part.is_waited_for for part in parts)


def test_probes_wait_for_the_copies_of_the_layers_that_they_read_and_for_no_others():
    groups = [
        StandIn(table=0, block_size=2, at=0, is_probed=number == 0, pages=lambda blocks: blocks) for number in (0, 1)
    ]
    for ended in ((True, False), (False, True)):
        parts = [StandIn(done=lambda part=part: part) for part in ended]
        device = StandIn(overlaps_compute=True, load=lambda *given, parts=parts: parts[given[-1]])
        load = LayerCopies(device, groups).load([], [np.ones(1, np.int64)], 0)
        assert (load.probed.done(), load.all.done()) == (ended[0], False)
