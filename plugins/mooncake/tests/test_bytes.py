"""What is put is what is got, or nothing; in a real cluster."""

from collections.abc import Callable

import numpy as np
import pytest
from blendhub_mooncake.bytes import MooncakeBytes

from blendhub.core.errors import InvalidInput, StoreAway, StoreFailed
from blendhub.hub.memory.arena import Arena
from harness.servers.mooncake_cluster import LEASE_MS, Cluster
from harness.waiting import wait_until

pytestmark = pytest.mark.slow
MIB = 2**20


def content(seed: int, size: int) -> bytes:
    """Bytes that no other seed gives."""
    return np.random.default_rng(seed).bytes(size)


def put(place: MooncakeBytes, arena: Arena, key: str, data: bytes) -> bool:
    arena.slot(0, len(data))[:] = data
    return place.put([key], [(0, len(data))]) == [True]


def got(place: MooncakeBytes, arena: Arena, key: str, size: int) -> bytes | None:
    """What comes to another place of the arena."""
    offset = 32 * MIB
    arena.slot(offset, size)[:] = bytes(size)
    return bytes(arena.slot(offset, size)) if place.get([key], [(offset, size)]) == [True] else None


@pytest.fixture(scope="module")
def place(lasting_cluster: Cluster, open_bytes: Callable[..., MooncakeBytes]) -> MooncakeBytes:
    return open_bytes(lasting_cluster)


def test_a_batch_of_any_sizes_comes_back_at_other_offsets(place: MooncakeBytes, arena: Arena) -> None:
    sizes = [1, 4095, 4096, 65_537, 3 * MIB + 1, 16 * MIB]
    keys = [f"group/{size}" for size in sizes]
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    for start, size in zip(starts, sizes, strict=True):
        arena.slot(start, size)[:] = content(size, size)
    assert place.put(keys, list(zip(starts, sizes, strict=True))) == [True] * len(keys)
    arena.slot(0, 64 * MIB)[:] = bytes(64 * MIB)
    others = [start + 30 * MIB + 7 for start in starts]
    assert place.get(keys, list(zip(others, sizes, strict=True))) == [True] * len(keys)
    for other, size in zip(others, sizes, strict=True):
        assert bytes(arena.slot(other, size)) == content(size, size)
    assert bytes(arena.slot(0, 30 * MIB)) == bytes(30 * MIB), "a get wrote outside its extents"


def test_an_object_that_is_shorter_than_the_span_is_not_what_was_asked_for(place: MooncakeBytes, arena: Arena) -> None:
    assert put(place, arena, "short", content(1, MIB))
    assert got(place, arena, "short", MIB + 1) is None and got(place, arena, "short", 2 * MIB) is None


def test_what_has_no_room_is_not_stored_and_nothing_else_suffers(place: MooncakeBytes, arena: Arena) -> None:
    """The node gives 128 MiB; Mooncake drops the oldest by itself, and what is left is whole."""
    stored = [seed for seed in range(60) if put(place, arena, f"key {seed}", content(seed, 4 * MIB))]
    kept = []
    for seed in stored:
        data = got(place, arena, f"key {seed}", 4 * MIB)
        assert data in (None, content(seed, 4 * MIB))
        kept += [seed] if data else []
    assert 0 < len(kept) < 60
    wait_until(lambda: put(place, arena, "later", content(99, 4 * MIB)), LEASE_MS / 1000 + 10)


def test_extents_outside_the_arena_and_keys_that_are_named_twice_are_refused(place: MooncakeBytes) -> None:
    for extent in ((0, 0), (-1, 4), (64 * MIB - 3, 4), (64 * MIB, 1), (2**70, 1)):
        with pytest.raises(InvalidInput, match="not inside an arena"):
            place.get(["key"], [extent])
    with pytest.raises(InvalidInput, match="distinct keys"):  # Mooncake would fill one span only
        place.get(["key", "key"], [(0, 1), (1, 1)])


def test_counters_say_what_was_moved(place: MooncakeBytes, arena: Arena) -> None:
    before = place.stats()
    assert place.get([], []) == place.put([], []) == []
    assert put(place, arena, "counted", content(1, MIB))
    assert place.get(["counted", "never"], [(0, MIB), (MIB, MIB)]) == [True, False]
    counted = {name for name, value in place.stats().items() if value == before[name] + 1}
    assert counted == {"mooncake_put_keys", "mooncake_get_keys", "mooncake_get_absent"}


@pytest.mark.parametrize(
    ("codes", "error"),
    [([-900, -901], StoreAway), ([-900, -707], StoreFailed)],
    ids=["the master", "the master and a lease"],
)
def test_a_master_that_does_not_answer_is_away_and_other_failures_are_not(place, monkeypatch, codes, error) -> None:
    monkeypatch.setattr(place, "_call", lambda call: (place._process, codes))
    with pytest.raises(StoreFailed, match="2 of its keys failed, the first with code -900") as raised:
        place.get(["one", "other"], [(0, MIB), (MIB, MIB)])
    assert type(raised.value) is error
