"""The allocator of the arena, compared with a map of single grains."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub.core.errors import InvalidInput
from blendhub.hub.memory import extents
from blendhub.hub.memory.extents import GRAIN, Extents

SIZE = 40 * GRAIN
steps = st.lists(st.one_of(st.integers(1, 12 * GRAIN), st.just(None)), max_size=60)


@given(steps, st.randoms(use_true_random=False))
def test_every_grain_has_one_owner_and_room_is_found_if_there_is_any(steps, random):
    arena = Extents(SIZE)
    taken: list[tuple[int, int]] = []
    for size in steps:
        if size is None:
            if taken:
                arena.free(*taken.pop(random.randrange(len(taken))))
            continue
        start = arena.allocate(size)
        if start is None:
            assert longest_free(taken) < Extents(SIZE).rounded(size), "there was room, but it was not found"
        else:
            taken.append((start, size))
        check(arena, taken)


def check(arena: Extents, taken: list[tuple[int, int]]) -> None:
    owners = [0] * (SIZE // GRAIN)
    for start, size in [*taken, *arena.free_extents()]:
        for grain in range(start // GRAIN, (start + Extents(SIZE).rounded(size)) // GRAIN):
            owners[grain] += 1
    assert owners == [1] * len(owners)
    free = arena.free_extents()
    assert arena.free_bytes == sum(size for _, size in free)
    assert all(start + size < after for (start, size), (after, _) in itertools.pairwise(free)), "neighbours are free"
    at, seen = 0, []
    while at is not None:
        seen.append((at, arena.size_of(at)))
        assert arena.is_free(at) == (seen[-1] in free)
        assert arena.after(at) is None or arena.before(arena.after(at)) == at
        at = arena.after(at)
    assert sum(size for _, size in seen) == SIZE


def longest_free(taken: list[tuple[int, int]]) -> int:
    longest = at = 0
    for start, size in sorted(taken):
        longest = max(longest, start - at)
        at = start + Extents(SIZE).rounded(size)
    return max(longest, SIZE - at)


@pytest.mark.parametrize("start, size", [(64, 64), (0, 64), (0, 128)])
def test_what_is_not_in_use_cannot_be_freed(start, size):
    arena = Extents(SIZE)
    arena.free(arena.allocate(128), 128)
    with pytest.raises(InvalidInput, match="not an extent in use"):
        arena.free(start, size)
    assert arena.free_bytes == SIZE


def test_an_arena_has_a_bounded_number_of_slots(monkeypatch):
    monkeypatch.setattr(extents, "MOST_SLOTS_OF_AN_ARENA", 10)
    arena = Extents(100 * GRAIN + 1)
    starts = list(iter(lambda: arena.allocate(1), None))
    assert len(starts) == 9 and arena.size_of(starts[0]) == 11 * GRAIN
