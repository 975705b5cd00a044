"""The store behind the arena: evicted chunks come back, also after a restart; damaged ones do not; a store that is
slow, away or broken costs what it does not keep, and nothing else."""

import asyncio
import time

import msgspec
import pytest

from blendhub.client import wire
from blendhub.core.errors import StoreAway, StoreFailed
from blendhub.core.spans import Span
from blendhub.hub.stores import store_writer
from tests.hub.hub_direct import CHUNK, tokens

TEXTS = [tokens(seed, 2 * CHUNK) for seed in range(8)]


@pytest.fixture
def place(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def small_hub(make_hub, place):
    """A hub with memory for four chunks, and disk space for many, which has stored all texts."""
    hub = make_hub(4, place)
    hub.member = hub.join()
    fill(hub, hub.member)
    return hub


def fill(hub, member, texts=TEXTS):
    for text in texts:
        member.store(text)
        hub.settle()


def failing(error):
    def fail(*arguments):
        raise error

    return fail


def test_evicted_chunks_come_back_from_the_store_until_all_is_cleared(small_hub, monkeypatch, place):
    member, reader = small_hub.member, small_hub.tier.reader
    found = member.lookup(TEXTS[0])
    assert found.on_the_way_tokens == len(TEXTS[0]) and found.lease is None and not found.matches
    # A chunk that arrives while a lookup that waits for it is answered is loaded once.
    small_hub.run(asyncio.sleep(0))  # the threads read, and the loop does not hear of it
    time.sleep(0.1)
    assert member.read(TEXTS[0]) == len(TEXTS[0])
    assert reader.loaded == 2
    with monkeypatch.context() as trouble:
        trouble.setattr(small_hub.tier.store, "load_chunks", failing(StoreFailed("too many open files")))
        assert not member.lookup(TEXTS[1], wait_s=5.0).matches
        small_hub.settle()
    for text in TEXTS:
        assert member.read(text) == len(text), "what could not be read just now is found again"
        small_hub.state.check_integrity()
    member.ask(wire.Clear)
    small_hub.close()
    assert not list(place.rglob("*.kv"))


def test_what_only_the_store_has_is_left_out_of_a_match(make_hub, place):
    hub, text = make_hub(4, place), tokens(9, 3 * CHUNK)
    member = hub.join()
    run = member.store(text).run
    hub.settle()
    hub.state.cache.remove(hub.index.runs[run].chunks[CHUNK])
    found = member.lookup(text)
    assert [match.span for match in found.matches] == [Span(0, CHUNK), Span(2 * CHUNK, 3 * CHUNK)]
    assert [match.source_start for match in found.matches] == [0, 2 * CHUNK]
    assert found.on_the_way == hub.ask(wire.Preview(), [text.tobytes()]).on_the_way == (Span(CHUNK, 2 * CHUNK),)
    assert [piece.span for piece in found.pieces] == [match.span for match in found.matches]
    member.check(found, text)


def test_everything_stored_is_matchable_after_a_restart_around_what_was_lost_or_damaged(make_hub, place):
    hub = make_hub(32, place)
    member = hub.join()
    fill(hub, member)
    grown = tokens(50, 6 * CHUNK)
    run = member.store(grown, Span(0, CHUNK)).run
    member.store(grown, Span(CHUNK, 6 * CHUNK), run=run)
    member.store(tokens(51, 50), exact=False)
    hub.settle()
    (lost,) = place.rglob(f"*-{2 * CHUNK}-{3 * CHUNK}.kv")
    lost.unlink()
    (damaged,) = place.rglob(f"*-{4 * CHUNK}-{5 * CHUNK}.kv")
    damaged.write_bytes(damaged.read_bytes()[:-5] + b"other")
    hub.restart()
    member = hub.join()
    hub.state.check_integrity()
    assert all(member.read(text) == len(text) for text in TEXTS)
    found = member.lookup(grown, wait_s=5.0)
    assert [piece.span.start // CHUNK for piece in found.pieces] == [0, 1, 3, 5]
    assert all(match.exact for match in found.matches)
    member.check(found, grown)
    assert hub.service.stats().counters["store_corrupted"] == 1
    blended = member.lookup(tokens(51, 50), wait_s=5.0)
    assert blended.pieces and not any(match.exact for match in blended.matches)


@pytest.mark.parametrize("spans", [[(0, 32), (16, 48)], [(0, 64)], [(64, 100)], []])
def test_a_store_that_lists_chunks_that_no_hub_stores_is_restored_without_them(make_hub, place, monkeypatch, spans):
    hub = make_hub(8, place)
    fill(hub, hub.join(), TEXTS[:2])
    good, bad = list(hub.tier.store.runs())
    bad = msgspec.structs.replace(bad, chunks=tuple(Span(*span) for span in spans))
    restored = make_hub(8, place.with_name("another"))
    monkeypatch.setattr(restored.tier.store, "runs", lambda: iter([bad, good]))
    assert restored.tier.restore() == 2


# Saves that fail, or come too late.


def test_a_chunk_whose_save_failed_in_any_way_can_be_evicted_and_cleared(make_hub, place, monkeypatch):
    hub = make_hub(8, place)
    member = hub.join()
    with monkeypatch.context() as trouble:
        trouble.setattr(hub.tier.store, "save_chunks", failing(KeyError("a fault of the store")))
        member.store(tokens(1, 8 * CHUNK))
        while hub.tier.writer.waiting:
            hub.settle()
    assert hub.service.stats().counters["store_failures"] == 8
    assert len(member.store(tokens(2, 4 * CHUNK)).slots) == 4, "four chunks were evicted"
    hub.settle()
    member.ask(wire.Clear)
    assert hub.arena.extents.free_bytes == hub.arena.name.size


def test_what_waits_while_the_store_is_away_has_a_bound_and_is_evicted_like_anything(make_hub, place, monkeypatch):
    monkeypatch.setattr(store_writer, "MOST_WAITING_SAVES", 5)
    monkeypatch.setattr(store_writer, "TRY_AGAIN_S", 0.05)
    hub = make_hub(8, place)
    member = hub.join()
    with monkeypatch.context() as trouble:
        trouble.setattr(hub.tier.store, "save_chunks", failing(StoreAway("the store is away")))
        for seed in range(12):
            assert member.store(tokens(seed, CHUNK)).lease is not None
            hub.settle()
        assert hub.tier.writer.waiting == 5
        member.store(tokens(20, 4 * CHUNK))
        hub.settle()
        assert hub.service.stats().counters["store_skipped"] == 11
    while hub.tier.writer.waiting:
        hub.run(asyncio.sleep(0.01))
    assert 0 < hub.tier.writer.saved <= 5
