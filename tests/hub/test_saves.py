"""Saves to the store: what they cost the hub, and what is left of a chunk that could not be saved."""

import asyncio

from blendhub.client import wire
from blendhub.contracts import Envelope
from blendhub.core.errors import StoreAway
from blendhub.hub.handlers import writes as write_handlers
from blendhub.hub.stores import store_writer as saves
from tests.hub.hub_direct import CHUNK, tokens

LONG = 512
"""Chunks of a long run."""


def a_hub_and_its_store(make_hub, tmp_path, n_slots=LONG):
    hub = make_hub(n_slots=n_slots, store=tmp_path / "store")
    hub.tier.store._catalogue.capacity = 2**40
    return hub, hub.tier.store


def test_a_chunk_whose_save_failed_in_any_way_can_be_evicted_and_cleared(make_hub, tmp_path, monkeypatch):
    hub, store = a_hub_and_its_store(make_hub, tmp_path, n_slots=8)

    def fail(*arguments):
        raise KeyError("a fault of the store")

    member = hub.join()
    with monkeypatch.context() as trouble:
        trouble.setattr(store, "save_chunks", fail)
        member.store(tokens(1, 8 * CHUNK))
        while hub.tier.writer.waiting:
            hub.settle()
    assert hub.service.stats().counters["store_failures"] == 8
    assert member.store(tokens(2, 4 * CHUNK)).lease is not None, "four chunks were evicted"
    hub.settle()
    member.ask(wire.Clear)
    assert hub.arena.extents.free_bytes == hub.arena.name.size
    hub.state.check_integrity()


def test_only_so_many_chunks_wait_for_the_store(make_hub, tmp_path, monkeypatch):
    monkeypatch.setattr(saves, "MOST_WAITING_SAVES", 3)
    hub, _ = a_hub_and_its_store(make_hub, tmp_path, n_slots=8)
    hub.join().store(tokens(1, 8 * CHUNK))
    hub.settle()
    (index,) = hub.state.indexes
    assert [chunk.in_store for chunk in index.chunks()] == [False] * 5 + [True] * 3
    assert hub.service.stats().counters["store_skipped"] == 5
    hub.state.check_integrity()


def test_a_batch_that_the_store_never_takes_keeps_no_other_from_it(make_hub, tmp_path, monkeypatch):
    hub, store = a_hub_and_its_store(make_hub, tmp_path, n_slots=16)
    monkeypatch.setattr(saves, "TRY_AGAIN_S", 0.01)
    refused, save = [], store.save_chunks

    def save_chunks(key, chunks):
        if not refused or key == refused[0]:
            refused.append(key)
            raise StoreAway("the store is away")
        return save(key, chunks)

    monkeypatch.setattr(store, "save_chunks", save_chunks)
    member = hub.join()
    for seed in range(2):
        member.store(tokens(seed, 8 * CHUNK))
    while hub.tier.writer.saved < 8 or len(refused) < 2:
        hub.run(asyncio.sleep(0.01))
    assert hub.tier.writer.waiting == 8


def test_what_is_put_off_while_the_store_is_away_has_a_bound_and_is_evicted_like_anything(
    make_hub, tmp_path, monkeypatch
):
    monkeypatch.setattr(saves, "MOST_WAITING_SAVES", 5)
    monkeypatch.setattr(saves, "TRY_AGAIN_S", 0.05)
    hub, store = a_hub_and_its_store(make_hub, tmp_path, n_slots=8)

    def away(*arguments):
        raise StoreAway("the store is away")

    member = hub.join()
    with monkeypatch.context() as trouble:
        trouble.setattr(store, "save_chunks", away)
        for seed in range(12):
            assert member.store(tokens(seed, CHUNK)).lease is not None
            hub.settle()
        assert hub.tier.writer.waiting == 5 and hub.service.stats().counters["store_skipped"] > 0
    while hub.tier.writer.waiting:
        hub.run(asyncio.sleep(0.01))
    assert 0 < hub.tier.writer.saved <= 5
    hub.state.check_integrity()


def test_a_clear_of_many_chunks_lets_other_requests_in_between(make_hub, monkeypatch):
    monkeypatch.setattr(write_handlers, "AT_ONCE", 64)
    hub = make_hub(n_slots=LONG)
    member = hub.join()
    member.store(tokens(1, LONG * CHUNK))
    turns = []

    async def count_turns(clearing):
        while not clearing.done():
            turns.append(len(hub.state.cache.policy))
            await asyncio.sleep(0)

    async def both():
        ids = {"session": member.registered.session, "epoch": member.registered.epoch}
        clearing = asyncio.ensure_future(hub.service.handle(b"peer", Envelope(wire.Clear(**ids))))
        await count_turns(clearing)

    hub.run(both())
    assert turns[-1] == 0 and len(set(turns)) > 3
    hub.state.check_integrity()
