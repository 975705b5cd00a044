"""Memory for chunks: the arena's default size, its allocator against a map of single grains, and the order of eviction
against simple models; the geometry of slots, and who may share them."""

import asyncio
import itertools
import random
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub.core.errors import ArenaFull, InvalidInput, LayoutMismatch
from blendhub.core.layout import KVLayout, Namespace, Variant, check_same, section_starts
from blendhub.core.plugin_choice import PluginChoice
from blendhub.core.spans import Span
from blendhub.hub.memory import arena, default_size, extents, segments
from blendhub.hub.memory.arena import Arena
from blendhub.hub.memory.eviction import S3FIFO
from blendhub.hub.memory.extents import GRAIN, Extents
from tests.hub.hub_direct import CHUNK, LAYOUT, namespace, tokens

SIZE = 40 * GRAIN
GIB = 2**30
CALLS = ["insert", "touch", "hold", "release", "remove", "evict"]


@given(
    st.lists(st.one_of(st.integers(1, 12 * GRAIN), st.sampled_from(["free", "grow"])), max_size=60),
    st.integers(0, 40),
    st.randoms(use_true_random=False),
)
def test_every_grain_has_one_owner_and_room_is_found_if_there_is_any(steps, first, random):
    arena = Extents(SIZE)
    arena.grow(first * GRAIN)
    taken: list[tuple[int, int]] = []
    for step in steps:
        if step == "grow":
            arena.grow(min(SIZE, arena.size + random.randrange(10 * GRAIN)))
        elif step == "free":
            if taken:
                arena.free(*taken.pop(random.randrange(len(taken))))
        elif (start := arena.allocate(step)) is None:
            assert longest_free(arena, taken) < arena.rounded(step), "there was room, but it was not found"
        else:
            taken.append((start, step))
        check(arena, taken)


def check(arena: Extents, taken: list[tuple[int, int]]) -> None:
    owners = [0] * (arena.size // GRAIN)
    free = arena.free_extents()
    for start, size in [*taken, *free]:
        for grain in range(start // GRAIN, (start + arena.rounded(size)) // GRAIN):
            owners[grain] += 1
    assert owners == [1] * len(owners)
    assert arena.free_bytes == sum(size for _, size in free)
    assert all(start + size < after for (start, size), (after, _) in itertools.pairwise(free)), "neighbours are free"
    for start, size in free:
        assert arena.is_free(start) and arena.size_of(start) == size
        assert arena.after(start) is None or arena.before(arena.after(start)) == start


def longest_free(arena: Extents, taken: list[tuple[int, int]]) -> int:
    longest = at = 0
    for start, size in sorted(taken):
        longest = max(longest, start - at)
        at = start + arena.rounded(size)
    return max(longest, arena.size - at)


def test_an_arena_has_a_bounded_number_of_slots(monkeypatch):
    monkeypatch.setattr(extents, "MAX_SLOTS_OF_AN_ARENA", 10)
    arena = Extents(100 * GRAIN + 1)
    arena.grow(100 * GRAIN + 1)
    starts = list(iter(lambda: arena.allocate(1), None))
    assert len(starts) == 9 and arena.size_of(starts[0]) == 11 * GRAIN


@given(st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 9)), max_size=120))
def test_the_order_has_what_was_inserted_and_evicts_nothing_held(calls):
    policy, known, held = S3FIFO(), set(), set()
    for call, key in calls:
        if call == "insert" and key not in known:
            policy.insert(key, key % 4)
            known.add(key)
        elif call == "touch" and key in known:
            policy.touch(key)
        elif call == "hold" and key in known - held:
            policy.hold(key)
            held.add(key)
        elif call == "release" and key in held:
            policy.release(key)
            held.discard(key)
        elif call == "remove" and key in known:
            policy.remove(key)
            known.discard(key)
            held.discard(key)
        elif call == "evict":
            evicted = policy.evict()
            assert known == held if evicted is None else evicted in known - held
            known.discard(evicted)
        assert len(policy) == len(known)
        assert all((key in policy) == (key in known) for key in range(10))


def test_what_is_used_stays_through_scans_of_texts_that_never_repeat():
    """The least recently used key would be forgotten in each scan: 150 hits."""
    working_set = list(range(50))
    scans = [[*range(1000 + scan * 200, 1200 + scan * 200), *working_set] for scan in range(10)]
    policy, stored, hits = S3FIFO(), set(), 0
    for key in itertools.chain(working_set * 4, *scans):
        if key in stored:
            policy.touch(key)
            hits += 1
            continue
        while len(stored) >= 100:
            stored.discard(policy.evict())
        policy.insert(key, key)
        stored.add(key)
    assert hits > 550


SMALL = 4096
LARGE = 64
"""Slots of the small size that the large one takes."""


def test_a_large_slot_evicts_at_most_twice_the_bytes_that_it_needs_and_room_that_is_not_there_is_soon_known(make_hub):
    """The hub is full of small chunks, which were used in an order that has nothing to do with where they are."""
    hub = make_hub(SMALL)
    member, text = hub.join("small"), tokens(1, SMALL * CHUNK)
    member.store_all(text)
    (run,) = hub.index.runs.values()
    chunks = list(run.chunks.values())
    assert len(chunks) == SMALL and not hub.arena.extents.free_bytes
    random.Random(1).shuffle(chunks)
    for chunk in chunks:
        hub.state.cache.policy.of(chunk).touch(chunk)
    layout = msgspec.structs.replace(LAYOUT, chunk_tokens=LARGE * CHUNK)
    begun = time.perf_counter()
    hub.join("large", namespace=namespace("large", layout=layout)).store(tokens(2, LARGE * CHUNK))
    assert time.perf_counter() - begun < 0.5
    assert hub.state.cache.evictions <= 2 * LARGE
    hub.state.check_integrity()
    middle = SMALL // 2 * CHUNK
    assert member.lookup(text[middle : middle + CHUNK]).lease is not None
    half = hub.join("half", namespace=namespace("half", layout=msgspec.structs.replace(LAYOUT, layers=SMALL + 4)))
    begun = time.perf_counter()
    with pytest.raises(ArenaFull):
        half.reserve(tokens(2, CHUNK))
    assert time.perf_counter() - begun < 1.0


# Sizes.

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


@given(st.lists(layouts, min_size=1, max_size=4), sizes, sizes, st.integers(0, 30))
def test_sections_do_not_overlap_and_ranks_with_the_same_kv_share_a_shard_that_one_of_them_writes(
    some, n_shards, copies, start
):
    first, *others = (msgspec.structs.replace(layout, chunk_tokens=some[0].chunk_tokens) for layout in some)
    space = Namespace(model="m", layout=first, world_size=n_shards * copies, copies=copies, other_layouts=tuple(others))
    starts = section_starts(space.layouts)
    ends = [start + layout.shard_bytes for start, layout in zip(starts, space.layouts, strict=True)]
    assert starts[0] == 0 and ends[-1] == space.shard_bytes
    assert all(end <= start for end, (_, start) in zip(ends, itertools.pairwise(starts), strict=False))
    assert space.slot_bytes == n_shards * space.shard_bytes
    for chunk in space.chunks_of(Span(start, start + 3 * space.chunk_tokens)):
        written = [space.shard_start(rank) for rank in range(space.world_size) if space.writes(rank, chunk)]
        assert written == list(range(0, space.slot_bytes, space.shard_bytes))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(space), type=Namespace) == space


def test_namespaces_are_told_apart_by_every_field():
    layout = KVLayout(layers=1, kv_heads=1, key_dim=2, value_dim=2, dtype="int8")
    base: dict[str, Any] = {"model": "m", "layout": layout, "world_size": 4, "state_layouts": (layout,)}
    others: dict[str, Any] = {
        **{"model": "n", "revision": "r", "weights": "w", "rotary": "x", "lora": "l", "cache_salt": "s"},
        **{"world_size": 2, "copies": 2, "matchers": (PluginChoice("prefix"),), "other_layouts": (layout,)},
        **{"state_layouts": (layout, layout), "moves_states": True},
        "layout": msgspec.structs.replace(layout, layers=2),
    }
    assert set(others) == set(Namespace.__struct_fields__)
    spaces = [Namespace(**{**base, name: other}) for name, other in others.items()]
    assert len({space.digest for space in (Namespace(**base), *spaces)}) == len(others) + 1
    for name, space in zip(others, spaces, strict=True):
        with pytest.raises(LayoutMismatch, match=f"engine 'e' is registered with another namespace: {name} is"):
            check_same(Namespace(**base), space, "engine 'e'")
    with pytest.raises(LayoutMismatch, match="4 ranks do not make groups of 3"):
        Namespace(**base, copies=3)
    with pytest.raises(LayoutMismatch, match="chunk_tokens"):
        Namespace(**base, other_layouts=(msgspec.structs.replace(layout, chunk_tokens=64),))
    with pytest.raises(LayoutMismatch, match="moves_states"):
        Namespace(model="m", layout=layout, moves_states=True)
    for salt, why in (("s" * 1025, "has 1,025 characters, and at most 1,024"), ("a\ud800", r"has '\\ud800' at 1")):
        with pytest.raises(InvalidInput, match=f"cache_salt {why}"):
            Variant(cache_salt=salt)
