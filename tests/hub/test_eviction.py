"""Room in the arena: its allocator against a map of single grains, the order of eviction against simple models, and
slots of different sizes."""

import itertools
import random
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub.core.errors import ArenaFull
from blendhub.hub.memory import extents
from blendhub.hub.memory.eviction import S3FIFO
from blendhub.hub.memory.extents import GRAIN, Extents
from tests.hub.hub_direct import CHUNK, LAYOUT, namespace, tokens

SIZE = 40 * GRAIN
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
    at, seen = 0 if arena.size else None, []
    while at is not None:
        seen.append((at, arena.size_of(at)))
        assert arena.is_free(at) == (seen[-1] in free)
        assert arena.after(at) is None or arena.before(arena.after(at)) == at
        at = arena.after(at)
    assert sum(size for _, size in seen) == arena.size


def longest_free(arena: Extents, taken: list[tuple[int, int]]) -> int:
    longest = at = 0
    for start, size in sorted(taken):
        longest = max(longest, start - at)
        at = start + arena.rounded(size)
    return max(longest, arena.size - at)


def test_an_arena_has_a_bounded_number_of_slots(monkeypatch):
    monkeypatch.setattr(extents, "MOST_SLOTS_OF_AN_ARENA", 10)
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
