"""The store behind the arena: evicted chunks come back, also after a restart; damaged ones do not; a store that is
slow, away or broken costs what it does not keep, and nothing else. And what requests with a salt stored is deleted from
index, arena and store; that nobody reads or publishes it meanwhile is in test_machine.py."""

import asyncio
import threading
import time

import msgspec
import numpy as np
import pytest

from blendhub.client import wire
from blendhub.core.errors import StoreAway, StoreFailed
from blendhub.core.layout import Variant
from blendhub.core.provenance import Provenance
from blendhub.core.spans import Span
from blendhub.hub.stores import store_tier, store_writer
from tests.hub.hub_direct import CHUNK, HOST, namespace, tokens

TEXTS = [tokens(seed, 2 * CHUNK) for seed in range(8)]


@pytest.fixture
def place(tmp_path):
    return tmp_path / "store"


def fill(hub, member, texts=TEXTS):
    for text in texts:
        member.store(text)
        hub.settle()


def failing(error):
    def fail(*arguments):
        raise error

    return fail


def test_evicted_chunks_come_back_from_the_store_until_all_is_cleared(make_hub, monkeypatch, place):
    small_hub = make_hub(4, place)
    member, reader = small_hub.join(), small_hub.tier.reader
    fill(small_hub, member)
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


def test_kv_that_ranks_share_is_in_the_store_once(make_hub, tmp_path):
    sizes = []
    for ranks in (1, 2):
        hub = make_hub(4, tmp_path / str(ranks))
        space = namespace(world_size=ranks, copies=ranks)
        first, *others = (hub.join(rank=rank, namespace=space) for rank in range(ranks))
        reserved = first.store(TEXTS[0])
        for member in others:
            member.commit(reserved)
        hub.settle()
        sizes.append(hub.tier.store.nbytes)
    assert sizes[0] == sizes[1] > 0


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
    hub.settle()
    hub.state.cache.remove(hub.index.runs[run].chunks[CHUNK])
    for fetched in ((Span(CHUNK, 2 * CHUNK),), ()):
        found = member.lookup(text, wait_s=5.0)
        assert found.fetched == fetched and not found.on_the_way, "what was read is in memory from then on"


def test_everything_stored_is_matchable_after_a_restart_around_what_was_lost_or_damaged(make_hub, place):
    hub = make_hub(32, place)
    member = hub.join()
    fill(hub, member)
    grown = tokens(50, 6 * CHUNK)
    run = member.store(grown, Span(0, CHUNK)).run
    member.store(grown, Span(CHUNK, 6 * CHUNK), run=run)
    member.store(tokens(51, 50), provenance=Provenance("after_blended"))
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


@pytest.mark.parametrize("loses", ["an aborted lease", "the store"])
def test_a_run_whose_tokens_the_store_has_beyond_its_chunks_grows_with_no_others(make_hub, place, loses):
    hub, text = make_hub(16, place), tokens(60, 4 * CHUNK)
    other = np.concatenate([text[: 2 * CHUNK], tokens(61, 2 * CHUNK)])
    member = hub.join()
    reserved = member.reserve(text)
    member.write(reserved, text)
    member.commit(reserved, 2 * CHUNK if loses == "an aborted lease" else None)
    hub.settle()
    if loses == "an aborted lease":
        member.ask(wire.Abort, lease=reserved.lease)
    else:
        for file in [*place.rglob(f"*-{2 * CHUNK}-*.kv"), *place.rglob(f"*-{3 * CHUNK}-*.kv")]:
            file.unlink()
        hub.restart()
        member = hub.join()
    (run,) = hub.index.runs
    assert member.store(other, Span(2 * CHUNK, 4 * CHUNK), run=run).run != run
    hub.settle()
    hub.restart()
    member = hub.join()
    assert member.read(text) == 2 * CHUNK and member.read(other) == 4 * CHUNK


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


def test_a_batch_that_the_store_never_takes_keeps_no_other_from_it(make_hub, place, monkeypatch):
    monkeypatch.setattr(store_writer, "TRY_AGAIN_S", 0.01)
    hub = make_hub(16, place)
    refused, save = [], hub.tier.store.save_chunks

    def save_chunks(key, chunks):
        if not refused or key == refused[0]:
            refused.append(key)
            raise StoreAway("the store is away")
        return save(key, chunks)

    monkeypatch.setattr(hub.tier.store, "save_chunks", save_chunks)
    fill(hub, hub.join(), [tokens(seed, 8 * CHUNK) for seed in range(2)])
    while hub.tier.writer.saved < 8 or len(refused) < 2:
        hub.run(asyncio.sleep(0.01))
    assert hub.tier.writer.waiting == 8


def test_what_waits_while_the_store_is_away_has_a_bound_and_is_evicted_like_anything(make_hub, place, monkeypatch):
    monkeypatch.setattr(store_writer, "MAX_WAITING_SAVES", 5)
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


A, B = Variant(cache_salt="a"), Variant(cache_salt="b")
DOCUMENT = tokens(1, 4 * CHUNK)


def forget(hub, salt="a"):
    hub.ask(wire.Forget(salt))
    hub.state.check_integrity()


class SlowStore:
    """A disk store whose saves and loads wait until they may go on."""

    def __init__(self, path):
        self.may_go_on = threading.Event()
        self.fails = False
        self._store = HOST.create("store", "disk", {"path": str(path), "capacity_gib": 0.001})

    def __getattr__(self, name):
        return getattr(self._store, name)

    def save_chunks(self, *chunks):
        assert self.may_go_on.wait(10)
        return self._store.save_chunks(*chunks)

    def load_chunks(self, loads):
        assert self.may_go_on.wait(10)
        return self._store.load_chunks(loads)

    def discard(self, *chunk):
        if self.fails:
            raise StoreFailed("the disk is away; mount it")
        self._store.discard(*chunk)


@pytest.mark.parametrize("saved_first", ["a", "b"])
def test_what_waits_to_be_saved_or_is_being_saved_is_deleted(make_hub, tmp_path, saved_first, monkeypatch):
    monkeypatch.setattr(store_tier, "WAIT_FOR_STORE_S", 0.02)
    store = SlowStore(tmp_path / "store")
    hub = make_hub(64, lambda: store)
    member = hub.join()
    for salt in (saved_first, *({"a", "b"} - {saved_first})):
        member.store(tokens(5, CHUNK), variant=Variant(cache_salt=salt))

    async def go_on():
        deleting = asyncio.ensure_future(hub.answer(wire.Forget("a")))
        await asyncio.sleep(0.05)
        assert hub.tier.writer.waiting == (2 if saved_first == "a" else 1), "only what is being saved stays"
        store.may_go_on.set()
        await deleting

    hub.run(go_on())
    hub.settle()
    assert len(list(store.runs())) == 1 and member.read(tokens(5, CHUNK), B) == CHUNK
    # A store that fails is an error, and the next deletion finishes.
    store.fails = True
    with pytest.raises(StoreFailed, match="mount it"):
        forget(hub, "b")
    store.fails = False
    forget(hub, "b")
    assert not list(store.runs())


def test_what_is_saved_or_loaded_while_it_is_cleared_is_found_no_more(make_hub, tmp_path, monkeypatch):
    monkeypatch.setattr(store_tier, "WAIT_FOR_STORE_S", 0.02)
    store = SlowStore(tmp_path / "store")
    hub = make_hub(64, lambda: store)
    member = hub.join()
    store.may_go_on.set()
    run = member.store(DOCUMENT, Span(0, 2 * CHUNK)).run
    hub.settle()
    hub.state.cache.remove(hub.index.runs[run].chunks[0])
    store.may_go_on.clear()
    member.lookup(DOCUMENT, acquire=False)
    member.store(DOCUMENT, Span(2 * CHUNK, 4 * CHUNK), run=run)
    hub.run(asyncio.sleep(0))
    assert hub.state.cache.filling and hub.tier.writer.batch
    hub.loop.call_later(0.05, store.may_go_on.set)
    member.ask(wire.Clear)
    hub.settle()
    assert not list(store.runs()) and member.lookup(DOCUMENT) == wire.Found()
