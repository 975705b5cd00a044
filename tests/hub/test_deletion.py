"""What requests with a salt stored is deleted: from index, arena, store and fleet, and nothing of any other salt."""

import asyncio
import contextlib
import threading
import time

import pytest

from blendhub.client import wire
from blendhub.client.hub_client import HubClient
from blendhub.core.errors import BlendHubError, InvalidInput, LeaseError, StoreFailed
from blendhub.core.layout import Variant
from harness.servers.redis_server import RedisServer, needs_redis
from tests.hub.fleet_direct import TEXT, Fleet, known, read
from tests.hub.hub_direct import CHUNK, HOST, namespace, tokens
from tests.hub.mapped import check, store
from tests.hub.processes import until

A, B = Variant(cache_salt="a"), Variant(cache_salt="b")
DOCUMENT = tokens(1, 4 * CHUNK)


def forget(hub, salt="a"):
    hub.ask(wire.Forget(salt))
    hub.state.check_integrity()


def held(member, prompt, variant=A):
    found = member.read(prompt, variant, wait_s=5.0)
    member.check(found, prompt)
    if found.lease is not None:
        member.ask(wire.Release, lease=found.lease)
    return sum(len(match.span) for match in found.matches)


def test_a_salt_is_deleted_whole_and_no_other(hub):
    member = hub.join()
    free = hub.state.cache.arena.extents.free_bytes
    member.store(DOCUMENT, variant=A)
    member.store(DOCUMENT, variant=Variant("an adapter", "a"))
    forget(hub)
    assert held(member, DOCUMENT) == held(member, DOCUMENT, Variant("an adapter", "a")) == 0
    assert hub.state.cache.arena.extents.free_bytes == free
    member.store(DOCUMENT, variant=B)
    member.store(DOCUMENT)
    forget(hub)  # deleting what is not there is fine
    assert held(member, DOCUMENT, B) == held(member, DOCUMENT, Variant()) == len(DOCUMENT)
    with pytest.raises(InvalidInput, match="name a cache salt"):
        forget(hub, "")


def test_a_reader_finishes_and_its_slots_are_free_afterwards(hub):
    member = hub.join()
    member.store(DOCUMENT, variant=A)
    free = hub.state.cache.arena.extents.free_bytes
    found = member.read(DOCUMENT, A)
    forget(hub)
    assert held(member, DOCUMENT) == 0 and hub.state.cache.arena.extents.free_bytes == free
    # Others fill the arena meanwhile.
    for seed in range(100, 170):
        member.store(tokens(seed, CHUNK))
    member.check(found, DOCUMENT)
    member.ask(wire.Release, lease=found.lease)
    hub.state.check_integrity()
    assert not hub.state.cache.erased


def test_what_is_being_written_is_never_published(hub):
    member = hub.join()
    reserved = member.reserve(DOCUMENT, variant=A)
    member.write(reserved, DOCUMENT)
    member.commit(reserved, 2 * CHUNK)
    forget(hub)
    with pytest.raises(LeaseError):
        member.commit(reserved)
    assert held(member, DOCUMENT) == 0
    # The slots are free once the writer has heard that it must not write.
    member.ask(wire.Ping, acknowledged=member.ask(wire.Ping).revoked)
    hub.state.check_integrity()
    assert not hub.state.writes.quarantined


# With a store.


def test_the_store_has_none_of_it_after_a_restart(make_hub, tmp_path):
    hub = make_hub(n_slots=5, store=tmp_path / "store")
    member = hub.join()
    member.store(DOCUMENT, variant=A)
    hub.settle()
    member.store(tokens(2, 3 * CHUNK), variant=B)  # pushes some of it out of the arena
    hub.settle()
    forget(hub)
    assert held(member, DOCUMENT) == 0
    hub.restart()
    reader = hub.join()
    assert held(reader, DOCUMENT) == 0 and held(reader, tokens(2, 3 * CHUNK), B) == 3 * CHUNK
    forget(hub, "b")
    assert not list((tmp_path / "store").rglob("*.kv"))


class SlowStore:
    """A disk store whose saves wait until they may go on."""

    def __init__(self, path):
        self.may_save = threading.Event()
        self.fails = False
        self._store = HOST.create("store", "disk", {"path": str(path), "capacity_gib": 0.001})

    def __getattr__(self, name):
        return getattr(self._store, name)

    def save_chunks(self, *given):
        assert self.may_save.wait(10)
        return self._store.save_chunks(*given)

    def discard(self, *given):
        if self.fails:
            raise StoreFailed("the disk is away; mount it")
        self._store.discard(*given)


def test_what_waits_to_be_saved_does_not_come_to_the_store(make_hub, tmp_path):
    store = SlowStore(tmp_path / "store")
    hub = make_hub(store=lambda: store)
    member = hub.join()
    member.store(tokens(5, CHUNK), variant=B)
    member.store(DOCUMENT, variant=A)

    async def go_on():
        deleting = asyncio.ensure_future(hub.service.forget(wire.Forget("a")))
        await asyncio.sleep(0.05)
        store.may_save.set()
        await deleting

    hub.run(go_on())
    hub.settle()
    hub.state.check_integrity()
    assert [len(run.chunks) for run in store.runs()] == [1]


def test_a_store_that_fails_is_an_error_and_the_next_deletion_finishes(make_hub, tmp_path):
    store = SlowStore(tmp_path / "store")
    store.may_save.set()
    hub = make_hub(store=lambda: store)
    hub.join().store(DOCUMENT, variant=A)
    hub.settle()
    store.fails = True
    with pytest.raises(StoreFailed, match="mount it"):
        forget(hub)
    hub.state.check_integrity()
    store.fails = False
    forget(hub)
    assert not list(store.runs())


@pytest.mark.slow
def test_a_hub_killed_while_it_deletes_loses_nothing_of_others_and_the_next_deletion_finishes(hub_process, tmp_path):
    place = tmp_path / "store"
    hub = hub_process(store=place, arena_gib=0.02)
    doomed = [tokens(100 + number, 6 * CHUNK) for number in range(40)]
    kept = [tokens(300 + number, 2 * CHUNK) for number in range(10)]

    def files():
        return len(list(place.rglob("*.kv")))

    def delete():
        with HubClient(hub.endpoint, timeout=10.0) as client, contextlib.suppress(BlendHubError):
            client.forget("a")  # the hub is killed meanwhile

    with HubClient(hub.endpoint) as client:
        client.register("e", namespace(), rank=0)
        for text in doomed:
            store(client, text, variant=A)
        for text in kept:
            store(client, text)
        until(lambda: not client.stats().gauges["store_waiting_chunks"])
    whole = files()
    for _ in range(3):
        deleting = threading.Thread(target=delete)
        deleting.start()
        deadline, before = time.monotonic() + 10, files()
        while files() > before - 20 and deleting.is_alive() and time.monotonic() < deadline:
            time.sleep(0.0005)
        hub.kill()
        deleting.join()
        hub.start()
    assert files() < whole, "no deletion had begun when the hub was killed"
    with HubClient(hub.endpoint) as client:
        client.register("e", namespace(), rank=0)
        client.forget("a")
        assert not any(client.lookup(text, A, acquire=False, wait_s=5.0).matches for text in doomed)
        assert all(check(client, text, wait_s=5.0) == len(text) for text in kept)
    assert files() == 10 * 2, "two chunks of each text without the salt"


# In a fleet.


@pytest.mark.slow
@needs_redis
def test_all_hubs_of_a_fleet_delete_it_also_from_their_arenas(make_hub, tmp_path):
    with RedisServer() as server:
        fleet = Fleet(make_hub, server, tmp_path / "place")
        one, other = fleet.pair()
        one.join().store(TEXT, variant=A)
        one.join(engine="another").store(tokens(3, CHUNK), variant=B)
        one.settle()
        fleet.until_each_knows(4)
        reader = other.join()
        assert read(reader, variant=A) == len(TEXT)
        # The hub that is asked is not the one that computed it.
        forget(other)
        fleet.until(lambda: known(one) == known(other) == 1, "all hubs delete it")
        assert len(fleet.files()) == 1 and read(reader, variant=A) == 0
        # A hub that knows nothing of it tells the others all the same.
        one.join(engine="third").store(tokens(4, CHUNK), variant=Variant(cache_salt="late"))
        forget(other, "late")
        one.settle()
        fleet.until(lambda: known(one) == known(other) == 1, "the writer hears of it")
        one.state.check_integrity()
