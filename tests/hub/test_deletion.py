"""What a request stored is deleted: from index, arena, store and fleet, and nothing of what others computed."""

import asyncio
import threading

import numpy as np
import pytest

from blendhub.client import wire
from blendhub.core.errors import Busy, InvalidInput, LeaseError, StoreFailed
from blendhub.core.layout import Variant
from blendhub.core.spans import Span
from blendhub.hub.limits import DELETIONS_A_SECOND
from harness.servers.redis_server import RedisServer, needs_redis
from tests.hub.fleet_direct import TEXT, Fleet, known, read
from tests.hub.hub_direct import CHUNK, HOST, namespace, tokens

A, B = "cmpl-a-0-1a2b3c4d", "chatcmpl-b-5e6f7a8b"
DOCUMENT = tokens(1, 4 * CHUNK)
LONGER = np.concatenate([DOCUMENT, tokens(2, 3 * CHUNK)])


def forget(hub, request="", salt=""):
    gone = hub.ask(wire.Forget(request=request, salt=salt))
    hub.state.check_integrity()
    return gone.tokens


def held(member, prompt, **more):
    found = member.read(prompt, wait_s=5.0, **more)
    member.check(found, prompt)
    if found.lease is not None:
        member.ask(wire.Release, lease=found.lease)
    return [(match.span.start, match.span.end) for match in found.matches]


@pytest.mark.parametrize("name", [A, "cmpl-a", "cmpl-a-0"])
def test_what_a_request_stored_is_gone_by_every_name_that_clients_know_it_by(hub, name):
    member = hub.join()
    member.store(DOCUMENT, request=A)
    free = hub.state.cache.arena.extents.free_bytes
    assert forget(hub, name) == len(DOCUMENT)
    assert held(member, DOCUMENT) == []
    assert hub.state.cache.arena.extents.free_bytes == free + 4 * namespace().slot_bytes
    assert forget(hub, name) == 0, "deleting what is not there is fine"
    assert not len(hub.state.indexes.requests)
    assert hub.service.counters.totals["tokens_deleted"] == len(DOCUMENT)


@pytest.mark.parametrize("name", ["cmpl", "cmpl-a-1", "a", "cmpl-a-0-1a2b3c4e", "x" * 256])
def test_other_names_delete_nothing(hub, name):
    member = hub.join()
    member.store(DOCUMENT, request=A)
    assert forget(hub, name) == 0
    assert held(member, DOCUMENT) == [(0, len(DOCUMENT))]


def test_what_another_request_computed_stays(hub):
    """The second request read the document and computed what follows; both are of its prompt, the latter is its own."""
    member = hub.join()
    member.store(DOCUMENT, request=A)
    member.store(LONGER, request=B)
    assert forget(hub, "cmpl-a") == len(DOCUMENT)
    assert held(member, LONGER) == [] or held(member, LONGER)[0][0] >= len(DOCUMENT)
    member.store(LONGER, Span(0, len(DOCUMENT)), request="third-11111111")
    assert held(member, LONGER) == [(0, len(DOCUMENT)), (len(DOCUMENT), len(LONGER))]
    assert forget(hub, "chatcmpl-b") == 3 * CHUNK
    assert held(member, LONGER) == [(0, len(DOCUMENT))]


def test_text_that_two_requests_computed_stays_until_both_are_deleted(hub):
    """Both computed it before either had stored it."""
    member = hub.join()
    first, second = (member.reserve(DOCUMENT, request=name) for name in (A, B))
    for reserved in (first, second):
        member.write(reserved, DOCUMENT)
        member.commit(reserved)
    assert forget(hub, "cmpl-a") == len(DOCUMENT)
    assert held(member, DOCUMENT) == [(0, len(DOCUMENT))]
    assert forget(hub, "chatcmpl-b") == len(DOCUMENT)
    assert held(member, DOCUMENT) == []


def test_a_run_never_goes_on_with_another_request_s_text(hub):
    member = hub.join()
    run = member.store(LONGER, Span(0, CHUNK), request=A).run
    assert member.store(LONGER, Span(CHUNK, 2 * CHUNK), request=A, run=run).run == run
    assert member.store(LONGER, Span(2 * CHUNK, 3 * CHUNK), request=B, run=run).run != run


def test_a_salt_is_deleted_whole_and_no_other(hub):
    member = hub.join()
    for number, salt in enumerate(["one", "one", "other", ""]):
        member.store(tokens(50 + number, CHUNK), variant=Variant(cache_salt=salt), request=f"r-{number}")
    member.store(tokens(60, CHUNK), variant=Variant("an adapter", "one"), request=A)
    assert forget(hub, salt="one") == 3 * CHUNK
    assert forget(hub, salt="one") == 0
    assert held(member, tokens(52, CHUNK), variant=Variant(cache_salt="other")) == [(0, CHUNK)]
    assert held(member, tokens(53, CHUNK)) == [(0, CHUNK)]


def test_a_reader_finishes_and_its_slots_are_free_afterwards(hub):
    member = hub.join()
    member.store(DOCUMENT, request=A)
    free = hub.state.cache.arena.extents.free_bytes
    found = member.read(DOCUMENT)
    assert forget(hub, "cmpl-a") == len(DOCUMENT)
    assert held(member, DOCUMENT) == [] and hub.state.cache.arena.extents.free_bytes == free
    # Others fill the arena meanwhile.
    for seed in range(100, 170):
        member.store(tokens(seed, CHUNK), request=f"r-{seed}")
    member.check(found, DOCUMENT)
    member.ask(wire.Release, lease=found.lease)
    hub.state.check_integrity()
    assert not hub.state.cache.erased


def test_what_is_being_written_is_never_published(hub):
    member = hub.join()
    reserved = member.reserve(DOCUMENT, request=A)
    member.write(reserved, DOCUMENT)
    member.commit(reserved, 2 * CHUNK)
    assert forget(hub, "cmpl-a") == 2 * CHUNK
    with pytest.raises(LeaseError):
        member.commit(reserved)
    assert held(member, DOCUMENT) == []
    # The slots are free once the writer has heard that it must not write.
    revoked = member.ask(wire.Ping).revoked
    member.ask(wire.Ping, acknowledged=revoked)
    hub.state.check_integrity()
    assert not hub.state.writes.quarantined


@pytest.mark.parametrize("asked", [{}, {"request": A, "salt": "s"}])
def test_one_thing_is_named(hub, asked):
    with pytest.raises(InvalidInput, match="name one"):
        hub.ask(wire.Forget(**asked))


def test_ten_thousand_deletions_a_second_cost_little_and_harm_nobody(hub):
    member = hub.join()
    for number in range(20):
        member.store(tokens(200 + number, CHUNK), request=f"r{number}-11111111")
    refused = 0
    for number in range(10_000):
        try:
            hub.ask(wire.Forget(request=f"never-{number}"))
        except Busy as error:
            refused += 1
            assert "ask again later" in str(error)
    assert refused == 10_000 - DELETIONS_A_SECOND
    assert sum(bool(held(member, tokens(200 + number, CHUNK))) for number in range(20)) == 20
    hub.now += 1.0
    assert forget(hub, "r3") == CHUNK


# With a store.


def test_the_store_has_none_of_it_after_a_restart(make_hub, tmp_path):
    first = make_hub(store=tmp_path / "store")
    member = first.join()
    member.store(DOCUMENT, request=A)
    member.store(LONGER, request=B)
    first.settle()
    assert forget(first, "cmpl-a") == len(DOCUMENT)
    first.close()
    second = make_hub(store=tmp_path / "store")
    reader = second.join()
    assert sum(end - start for start, end in held(reader, LONGER)) <= 3 * CHUNK
    assert forget(second, "chatcmpl-b") == 3 * CHUNK, "requests are known after a restart, too"
    second.close()
    assert not list((tmp_path / "store").rglob("*.kv"))


def test_what_only_the_store_has_is_deleted(make_hub, tmp_path):
    hub = make_hub(n_slots=4, store=tmp_path / "store")
    member = hub.join()
    member.store(DOCUMENT, request=A)
    hub.settle()
    member.store(tokens(9, 4 * CHUNK), request=B)
    hub.settle()
    assert forget(hub, "cmpl-a") == len(DOCUMENT)
    assert held(member, DOCUMENT) == []


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
    member.store(tokens(5, CHUNK), request=B)
    member.store(DOCUMENT, request=A)

    async def go_on():
        deleting = asyncio.ensure_future(hub.service.forget(wire.Forget(request="cmpl-a")))
        await asyncio.sleep(0.05)
        store.may_save.set()
        return await deleting

    assert hub.run(go_on()).tokens == len(DOCUMENT)
    hub.settle()
    hub.state.check_integrity()
    stored = list(store.runs())
    assert [len(run.chunks) for run in stored] == [1]


def test_a_store_that_fails_gives_no_receipt_and_the_next_deletion_finishes(make_hub, tmp_path):
    store = SlowStore(tmp_path / "store")
    store.may_save.set()
    hub = make_hub(store=lambda: store)
    member = hub.join()
    member.store(DOCUMENT, request=A)
    hub.settle()
    store.fails = True
    with pytest.raises(StoreFailed, match="mount it"):
        forget(hub, "cmpl-a")
    hub.state.check_integrity()
    store.fails = False
    assert forget(hub, "cmpl-a") == len(DOCUMENT)
    assert not list(store.runs())


# In a fleet.


@pytest.mark.slow
@needs_redis
def test_all_hubs_of_a_fleet_delete_it_also_from_their_arenas(make_hub, tmp_path):
    with RedisServer() as server:
        fleet = Fleet(make_hub, server, tmp_path / "place")
        one, other = fleet.hub(), fleet.hub()
        fleet.until(lambda: one.follower.hubs == other.follower.hubs == 2, "the hubs see each other")
        one.join().store(TEXT, request=A)
        one.join(engine="another").store(tokens(3, CHUNK), request=B)
        one.settle()
        fleet.until_each_knows(4)
        reader = other.join()
        assert read(reader) == len(TEXT)
        # The hub that is asked is not the one that computed it.
        assert forget(other, "cmpl-a") == len(TEXT)
        fleet.until(lambda: known(one) == known(other) == 1, "all hubs delete it")
        assert len(fleet.files()) == 1 and read(reader) == 0
        # A hub that knows nothing of it tells the others all the same.
        one.join(engine="third").store(tokens(4, CHUNK), request="cmpl-late-0-99999999")
        one.tier.forget([])
        assert forget(other, "cmpl-late") in (0, CHUNK)
        one.settle()
        fleet.until(lambda: known(one) == known(other) == 1, "the writer hears of it")
        one.state.check_integrity()
