"""The default size of the arena, and the layout of what it holds: geometry of slots, and who may share them."""

import asyncio
import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub.core.errors import InvalidInput, LayoutMismatch
from blendhub.core.layout import KVLayout, Namespace, Variant, check_same, section_starts
from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.spans import Span
from blendhub.hub.memory import arena, default_size, segments
from blendhub.hub.memory.arena import Arena

GIB = 2**30
NO_LIMIT_V1 = 9223372036854771712


def tree(path: str, groups: dict[str, tuple[object, int, int]], version: int = 2, root: str = "/") -> dict[str, str]:
    """The files of a process in the group ``path``; by group, as seen under the mount: limit, usage and page cache."""
    if version == 1:
        place, mount = "memory/", "cgroup cgroup rw,memory"
        names = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
    else:
        place, mount, names = "", "cgroup2 cgroup2 rw,nsdelegate", ("max", "current", "inactive_file")
    mounts = f"31 23 0:28 / / rw - ext4 /dev/sda rw\n41 31 0:38 {root} /sys/fs/cgroup/{place} rw - {mount}"
    files = {"proc/self/cgroup": f"9:name=systemd:/\n4:memory:{path}\n0::{path}", "proc/self/mountinfo": mounts}
    for group, (limit, usage, cache) in groups.items():
        folder = f"sys/fs/cgroup/{place}{group}/memory."
        numbers = {names[0]: limit, names[1]: usage, "stat": f"anon 1\n{names[2]} {cache}"}
        files |= {folder + name: str(number) for name, number in numbers.items()}
    return files


TREES = {
    "no control groups": ({}, 64),
    "its own limit, and pages of files can go": (tree("/a/b", {"/a/b": (8 * GIB, 7 * GIB, 4 * GIB)}), 5),
    "an ancestor's limit": (tree("/a/b", {"/a": (8 * GIB, 6 * GIB, 0), "/a/b": ("max", GIB, 0)}), 2),
    "memory.high": (tree("/a", {"/a": (9 * GIB, GIB, 0)}) | {"sys/fs/cgroup/a/memory.high": str(4 * GIB)}, 3),
    "a mount that begins at the container": (tree("/docker/1f", {"": (4 * GIB, GIB, 0)}, root="/docker/1f"), 3),
    "numbers that cannot be read": (tree("/a", {"/a": ("nonsense", 0, 0)}), 64),
    "v1, an ancestor's limit": (tree("/a/b", {"": (6 * GIB, 2 * GIB, 0), "/a/b": (NO_LIMIT_V1, 1, 0)}, 1), 4),
    "v1, another's limit": (tree("/a", {"/b": (1, 0, 0), "/a": (NO_LIMIT_V1, 0, 0)}, 1), 64),
}


@pytest.mark.parametrize("files, gib", TREES.values(), ids=TREES)
def test_what_control_groups_leave_is_what_is_available(tmp_path, files, gib):
    files = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 * 2**20} kB\n", **files}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert default_size.available_bytes(tmp_path) == gib * GIB


def test_the_arena_is_the_least_of_three_shares(monkeypatch):
    for (available, shared, taken, engines), expected in {
        (40, 100, 0, 1): 10,  # a quarter
        (40, 10, 0, 1): 5,  # half of /dev/shm
        (2000, 2000, 0, 8): 8,  # the most, for eight engines
        (40, 100, 20, 1): 5,  # beside a hub that reserves
        (40, 100, 80, 1): 0,
    }.items():
        numbers = {"available_bytes": available, "free_shared_bytes": shared, "unreserved_bytes": taken}
        for name, gib in numbers.items():
            monkeypatch.setattr(default_size, name, lambda gib=gib: gib * GIB)
        assert default_size.default_arena_bytes(engines) == expected * GIB


@pytest.mark.alone
def test_what_other_hubs_still_reserve_is_known(monkeypatch):
    monkeypatch.setattr(arena, "STEP", 2**16)
    before = segments.unreserved_bytes()
    one, other = Arena(2**20), Arena(2**22)
    assert segments.unreserved_bytes() - before == one.progress.left + other.progress.left > 2**22
    asyncio.run(other.reserve())
    assert segments.unreserved_bytes() - before == one.progress.left
    one.close()
    other.close()
    assert segments.unreserved_bytes() == before


# The layout of slots.

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


@given(layouts, st.integers(0, 30), st.integers(0, 30))
def test_parts_tile_a_section_and_chunks_a_span(layout, start, length):
    at = 0
    for layer in range(layout.layers):
        assert layout.keys_at(layer) == at
        at += layout.chunk_tokens * layout.key_row_bytes
        assert layout.values_at(layer) == at
        at += layout.chunk_tokens * layout.value_row_bytes
    assert at == layout.shard_bytes == layout.chunk_tokens * layout.token_bytes
    chunks = layout.chunks_of(Span(start, start + length))
    positions = [position for chunk in chunks for position in range(chunk.start, chunk.end)]
    assert positions == list(range(start, start + length))
    for chunk in chunks:
        assert len(chunk) and chunk.start // layout.chunk_tokens == (chunk.end - 1) // layout.chunk_tokens


@given(st.lists(layouts, min_size=1, max_size=4), sizes)
def test_the_sections_of_a_shard_do_not_overlap(some, world_size):
    first, *others = (msgspec.structs.replace(layout, chunk_tokens=some[0].chunk_tokens) for layout in some)
    space = Namespace(model="m", layout=first, world_size=world_size, other_layouts=tuple(others))
    starts = section_starts(space.layouts)
    ends = [start + layout.shard_bytes for start, layout in zip(starts, space.layouts, strict=True)]
    assert starts[0] == 0 and ends[-1] == space.shard_bytes
    assert all(end <= start for end, (_, start) in zip(ends, itertools.pairwise(starts), strict=False))
    assert space.slot_bytes == world_size * space.shard_bytes
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(space), type=Namespace) == space


def test_namespaces_are_told_apart_by_every_field():
    layout = KVLayout(layers=1, kv_heads=1, key_dim=2, value_dim=2, dtype="int8")
    base: dict[str, Any] = {"model": "m", "layout": layout}
    others: dict[str, Any] = {
        **{"model": "n", "revision": "r", "weights": "w", "rotary": "x", "lora": "l", "cache_salt": "s"},
        **{"world_size": 2, "matchers": (PluginChoice("prefix"),), "other_layouts": (layout,)},
        "layout": msgspec.structs.replace(layout, layers=2),
    }
    assert set(others) == set(Namespace.__struct_fields__)
    spaces = [Namespace(**{**base, name: other}) for name, other in others.items()]
    assert len({space.digest for space in (Namespace(**base), *spaces)}) == len(others) + 1
    for name, space in zip(others, spaces, strict=True):
        with pytest.raises(LayoutMismatch, match=f"engine 'e' is registered with another namespace: {name} is"):
            check_same(Namespace(**base), space, "engine 'e'")
    with pytest.raises(LayoutMismatch, match="chunk_tokens"):
        Namespace(**base, other_layouts=(msgspec.structs.replace(layout, chunk_tokens=64),))
    for salt, why in (("s" * 1025, "has 1,025 characters, and at most 1,024"), ("a\ud800", r"has '\\ud800' at 1")):
        with pytest.raises(InvalidInput, match=f"cache_salt {why}"):
            Variant(cache_salt=salt)
