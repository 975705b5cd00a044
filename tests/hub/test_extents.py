"""The allocator of the arena, compared with a map of single grains."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendhub.errors import InvalidInput
from blendhub.hub.extents import GRAIN, Extents, rounded

SIZE = 40 * GRAIN
steps = st.lists(st.one_of(st.integers(1, 12 * GRAIN), st.just(None)), max_size=60)


@given(steps, st.randoms(use_true_random=False))
def test_every_grain_has_one_owner_and_room_is_found_if_there_is_any(steps, random):
    extents = Extents(SIZE)
    taken: list[tuple[int, int]] = []
    for size in steps:
        if size is None:
            if taken:
                extents.free(*taken.pop(random.randrange(len(taken))))
            continue
        start = extents.allocate(size)
        if start is None:
            assert longest_free(taken) < rounded(size), "there was room, but it was not found"
        else:
            taken.append((start, size))
        check(extents, taken)


def check(extents: Extents, taken: list[tuple[int, int]]) -> None:
    owners = [0] * (SIZE // GRAIN)
    for start, size in [*taken, *extents.free_extents()]:
        for grain in range(start // GRAIN, (start + rounded(size)) // GRAIN):
            owners[grain] += 1
    assert owners == [1] * len(owners)
    free = extents.free_extents()
    assert extents.free_bytes == sum(size for _, size in free)
    assert all(start + size < after for (start, size), (after, _) in itertools.pairwise(free)), "neighbours are free"
    at, seen = 0, []
    while at is not None:
        seen.append((at, extents.size_of(at)))
        assert extents.is_free(at) == (seen[-1] in free)
        assert extents.after(at) is None or extents.before(extents.after(at)) == at
        at = extents.after(at)
    assert sum(size for _, size in seen) == SIZE


def longest_free(taken: list[tuple[int, int]]) -> int:
    longest = at = 0
    for start, size in sorted(taken):
        longest = max(longest, start - at)
        at = start + rounded(size)
    return max(longest, SIZE - at)


def test_slots_of_one_size_fill_the_arena_and_serve_again():
    extents = Extents(100 * 640)
    starts = [extents.allocate(640) for _ in range(100)]
    assert sorted(starts) == list(range(0, 64000, 640)) and extents.allocate(1) is None
    for start in starts[::2]:
        extents.free(start, 640)
    assert {extents.allocate(640) for _ in range(50)} == set(starts[::2])


@pytest.mark.parametrize("start, size", [(64, 64), (0, 64), (0, 128)])
def test_what_is_not_in_use_cannot_be_freed(start, size):
    extents = Extents(SIZE)
    extents.free(extents.allocate(128), 128)
    with pytest.raises(InvalidInput, match="not an extent in use"):
        extents.free(start, size)
    assert extents.free_bytes == SIZE
