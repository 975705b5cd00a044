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
    hub.state.check_integrity()
