"""The geometry of slots, and when two engines may share them."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub.core.errors import InvalidInput, LayoutMismatch
from blendhub.core.layout import KVLayout, Namespace, Variant, check_same, section_starts
from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.spans import Span

sizes = st.integers(1, 5)
layouts = st.builds(
    KVLayout,
    layers=sizes,
    kv_heads=sizes,
    key_dim=sizes,
    value_dim=st.integers(0, 5),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
    chunk_tokens=sizes,
)


@given(layouts)
def test_the_parts_of_a_shard_tile_it(layout):
    at = 0
    for layer in range(layout.layers):
        assert layout.keys_at(layer) == at
        at += layout.chunk_tokens * layout.key_row_bytes
        assert layout.values_at(layer) == at
        at += layout.chunk_tokens * layout.value_row_bytes
    assert at == layout.shard_bytes == layout.chunk_tokens * layout.token_bytes


@given(layouts, st.integers(0, 30), st.integers(0, 30))
def test_chunks_tile_a_span_and_stay_within_one_cell_of_the_grid(layout, start, length):
    span = Span(start, start + length)
    chunks = layout.chunks_of(span)
    assert [position for chunk in chunks for position in range(chunk.start, chunk.end)] == list(range(start, span.end))
    for chunk in chunks:
        assert len(chunk) and chunk.start // layout.chunk_tokens == (chunk.end - 1) // layout.chunk_tokens


@given(st.lists(layouts, min_size=1, max_size=4), sizes)
def test_the_sections_of_a_shard_do_not_overlap(some, world_size):
    first, *others = (msgspec.structs.replace(layout, chunk_tokens=some[0].chunk_tokens) for layout in some)
    space = Namespace(model="m", layout=first, world_size=world_size, other_layouts=tuple(others))
    ends = [
        start + layout.shard_bytes for start, layout in zip(section_starts(space.layouts), space.layouts, strict=True)
    ]
    assert section_starts(space.layouts)[0] == 0 and ends[-1] == space.shard_bytes
    assert all(end <= start for end, start in zip(ends, section_starts(space.layouts)[1:], strict=False))
    assert space.slot_bytes == world_size * space.shard_bytes
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(space), type=Namespace) == space


@pytest.mark.parametrize(
    "salt, why", [("s" * 1025, "has 1,025 characters, and at most 1,024"), ("a\ud800", r"has '\\ud800' at 1")]
)
def test_a_salt_that_no_message_can_hold_is_refused_by_the_client(salt, why):
    with pytest.raises(InvalidInput, match=f"cache_salt {why}"):
        Variant(cache_salt=salt)


def test_groups_of_layers_have_chunks_of_one_size():
    layout = KVLayout(layers=1, kv_heads=1, key_dim=2, value_dim=2, dtype="int8", chunk_tokens=32)
    with pytest.raises(LayoutMismatch, match="chunk_tokens"):
        Namespace(model="m", layout=layout, other_layouts=(msgspec.structs.replace(layout, chunk_tokens=64),))


def test_namespaces_are_told_apart_by_every_field():
    layout = KVLayout(layers=1, kv_heads=1, key_dim=2, value_dim=2, dtype="int8")
    base: dict[str, Any] = {"model": "m", "layout": layout}
    others: list[dict[str, Any]] = [
        {"model": "n"},
        {"revision": "r"},
        {"weights": "w"},
        {"rotary": "x"},
        {"lora": "l"},
        {"cache_salt": "s"},
        {"world_size": 2},
        {"matchers": (PluginChoice("prefix"),)},
        {"layout": KVLayout(layers=2, kv_heads=1, key_dim=2, value_dim=2, dtype="int8")},
        {"other_layouts": (layout,)},
    ]
    assert {name for other in others for name in other} == set(Namespace.__struct_fields__)
    digests = {Namespace(**{**base, **other}).digest for other in [{}, *others]}
    assert len(digests) == len(others) + 1
    for other in others:
        name = next(iter(other))
        with pytest.raises(LayoutMismatch, match=f"engine 'e' is registered with another namespace: {name} is"):
            check_same(Namespace(**base), Namespace(**{**base, **other}), "engine 'e'")
    check_same(Namespace(**base), Namespace(**base), "engine 'e'")
