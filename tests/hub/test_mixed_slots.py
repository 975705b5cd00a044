"""Slots of different sizes in one arena: room for a large one costs about as many bytes as it needs."""

import random
import time

import msgspec
import pytest

from blendhub.core.errors import ArenaFull
from tests.hub.hub_direct import CHUNK, LAYOUT, namespace, tokens

SMALL = 4096
LARGE = 64
"""Slots of the small size that the large one takes."""

LARGE_LAYOUT = type(LAYOUT)(layers=2, kv_heads=1, key_dim=4, value_dim=4, dtype="float16", chunk_tokens=LARGE * CHUNK)


@pytest.fixture
def full_hub(make_hub, request):
    """A hub full of small chunks, which were used in an order that has nothing to do with where they are."""
    hub = make_hub(n_slots=SMALL)
    member = hub.join("small")
    member.store_all(tokens(1, SMALL * CHUNK))
    (index,) = hub.state.indexes
    (run,) = index.runs.values()
    chunks = list(run.chunks.values())
    assert len(chunks) == SMALL and not hub.arena.extents.free_bytes
    random.Random(1).shuffle(chunks)
    for chunk in chunks:
        hub.state.cache.policy.of(chunk).touch(chunk)
    return hub


def test_a_large_slot_evicts_at_most_twice_the_bytes_that_it_needs(full_hub):
    large = full_hub.join("large", namespace=namespace("large", layout=LARGE_LAYOUT))
    begun = time.perf_counter()
    large.store(tokens(2, LARGE * CHUNK))
    assert time.perf_counter() - begun < 0.5
    assert full_hub.state.cache.evictions <= 2 * LARGE
    full_hub.state.check_integrity()


def test_room_that_is_not_there_is_looked_for_once(full_hub, monkeypatch):
    """Beginning anew at each of the chunks that are tried, the search would look at each extent dozens of times."""
    small = full_hub.join("other small")
    middle = SMALL // 2 * CHUNK
    assert small.lookup(tokens(1, SMALL * CHUNK)[middle : middle + CHUNK]).lease is not None
    layout = msgspec.structs.replace(LAYOUT, layers=LAYOUT.layers * (SMALL // 2 + 2))
    large = full_hub.join("large", namespace=namespace("large", layout=layout))
    extents, looked_at = full_hub.arena.extents, []
    monkeypatch.setattr(extents, "after", lambda start, after=extents.after: looked_at.append(start) or after(start))
    with pytest.raises(ArenaFull):
        large.reserve(tokens(2, layout.chunk_tokens))
    assert 0 < len(looked_at) < 2 * SMALL
    full_hub.state.check_integrity()
