"""The allocator of the arena, compared with a map of single grains."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from blendhub.hub.memory import extents
from blendhub.hub.memory.extents import GRAIN, Extents

SIZE = 40 * GRAIN


def of_size(size: int) -> Extents:
    arena = Extents(size)
    arena.grow(size)
    return arena


steps = st.lists(st.one_of(st.integers(1, 12 * GRAIN), st.sampled_from([None, "grow"])), max_size=60)


@given(steps, st.integers(0, 40), st.randoms(use_true_random=False))
def test_every_grain_has_one_owner_and_room_is_found_if_there_is_any(steps, first, random):
    arena = Extents(SIZE)
    arena.grow(first * GRAIN)
    taken: list[tuple[int, int]] = []
    for size in steps:
        if size == "grow":
            arena.grow(min(SIZE, arena.size + random.randrange(10 * GRAIN)))
        elif size is None:
            if taken:
                arena.free(*taken.pop(random.randrange(len(taken))))
        elif (start := arena.allocate(size)) is None:
            assert longest_free(arena, taken) < arena.rounded(size), "there was room, but it was not found"
        else:
            taken.append((start, size))
        check(arena, taken)


def check(arena: Extents, taken: list[tuple[int, int]]) -> None:
    owners = [0] * (arena.size // GRAIN)
    for start, size in [*taken, *arena.free_extents()]:
        for grain in range(start // GRAIN, (start + arena.rounded(size)) // GRAIN):
            owners[grain] += 1
    assert owners == [1] * len(owners)
    free = arena.free_extents()
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
    arena = of_size(100 * GRAIN + 1)
    starts = list(iter(lambda: arena.allocate(1), None))
    assert len(starts) == 9 and arena.size_of(starts[0]) == 11 * GRAIN
