"""Hubs that share a store find each other's chunks, and go on alone when the store is away."""

import asyncio
import secrets
import threading
import time

import numpy as np
import pytest
from blendhub_fleet.directory import open_store
from blendhub_fleet.options import DirectoryOptions
from hub_direct import CHUNK, namespace, tokens

from benchmarks.fleet.servers import RedisServer
from blendhub import wire
from blendhub.contracts import RunKey, StoredRun
from blendhub.hub.index import Saved
from blendhub.plan import Span

TEXT = tokens(1, 3 * CHUNK)
SOON_S = 60.0
"""Far more than it takes, on a machine that is busy with other tests."""


@pytest.fixture(scope="module")
def shared_server():
    with RedisServer() as server:
        yield server


@pytest.fixture
def server():
    """One that a test may kill."""
    with RedisServer() as server:
        yield server


class Fleet:
    """Hubs of one group, which run when they are asked to."""

    def __init__(self, make_hub, server, path, **options):
        self.make_hub, self.server, self.path = make_hub, server, path
        self.group = secrets.token_hex(4)
        self.options = {"deadline_s": 10.0, **options}
        self.hubs = []

    def open(self):
        return open_store(
            DirectoryOptions(catalogue=self.server.url, group=self.group, path=str(self.path), **self.options)
        )

    def hub(self, n_slots=32):
        self.hubs.append(self.make_hub(n_slots=n_slots, store=self.open))
        return self.hubs[-1]

    def until(self, condition, what):
        """Let all hubs run until the condition holds."""
        deadline = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {SOON_S:.0f} s"
            for hub in self.hubs:
                hub.run(pause())

    def until_each_knows(self, n_chunks):
        self.until(lambda: all(known(hub) == n_chunks for hub in self.hubs), f"every hub knows {n_chunks} chunks")
        for hub in self.hubs:
            hub.state.check_integrity()

    def files(self):
        return list(self.path.rglob("*.kv"))


async def pause():
    await asyncio.sleep(0.002)


def known(hub):
    return sum(index.n_chunks for index in hub.state.indexes)


def store(hub, member, text=TEXT, **more):
    """Store a text, and wait until it was offered to the fleet."""
    reserved = member.store(text, **more)
    hub.settle()
    return reserved


def read(member, text=TEXT):
    """How many tokens of the text come; all of them are checked."""
    found = member.read(text, wait_s=10.0)
    member.check(found, text)
    if found.lease is not None:
        member.ask(wire.Release, lease=found.lease)
    return sum(len(piece.span) for piece in found.pieces)


def count(hub, name):
    return hub.service.stats().counters[name]


@pytest.fixture
def fleet(make_hub, shared_server, tmp_path):
    return Fleet(make_hub, shared_server, tmp_path / "place")


@pytest.fixture
def two(fleet):
    one, other = fleet.hub(), fleet.hub()
    fleet.until(lambda: one.follower.hubs == other.follower.hubs == 2, "the hubs see each other")
    return one, other


def test_what_one_hub_stores_is_found_and_read_on_the_other(fleet, two):
    one, other = two
    store(one, one.join())
    fleet.until_each_knows(3)
    member = other.join()
    assert read(member) == len(TEXT)
    assert all(piece.exact for piece in member.read(TEXT).pieces)
    assert count(other, "fleet_fetched_bytes") == count(one, "fleet_sent_bytes") == 3 * namespace().slot_bytes
    assert count(other, "fleet_published_chunks") == 3 and count(one, "fleet_published_chunks") == 0


def test_it_is_found_at_another_place_of_a_prompt(fleet, two):
    one, other = two
    store(one, one.join())
    fleet.until_each_knows(3)
    member = other.join()
    prompt = np.concatenate([tokens(2, 40), TEXT])
    found = member.read(prompt, wait_s=10.0)
    assert sum(len(piece.span) for piece in found.pieces) == len(TEXT)
    assert not any(piece.exact for piece in found.pieces)


def test_a_late_hub_finds_everything(fleet):
    one = fleet.hub()
    member = one.join()
    fleet.until(lambda: one.follower.hubs == 1, "the hub has joined")
    texts = [tokens(seed, 2 * CHUNK) for seed in range(10, 20)]
    for text in texts:
        store(one, member, text)
    late = fleet.hub()
    fleet.until_each_knows(20)
    reader = late.join()
    assert [read(reader, text) for text in texts] == [2 * CHUNK] * 10


def test_a_run_that_grows_is_followed(fleet, two):
    one, other = two
    member = one.join()
    run = store(one, member, span=Span(0, CHUNK)).run
    fleet.until_each_knows(1)
    store(one, member, span=Span(CHUNK, 3 * CHUNK), run=run)
    fleet.until_each_knows(3)
    assert read(other.join()) == len(TEXT)
    (index,) = other.state.indexes
    (followed,) = index.runs.values()
    assert followed.foreign


def test_an_engine_does_not_grow_the_run_of_another_hub(fleet, two):
    one, other = two
    first = one.join()
    store(one, first)
    fleet.until_each_knows(3)
    (index,) = other.state.indexes
    (foreign,) = index.runs
    longer = np.concatenate([TEXT, tokens(9, 2 * CHUNK)])
    assert store(other, other.join(), longer, run=foreign).run != foreign
    fleet.until_each_knows(5)
    assert read(first, longer) == len(longer)


def test_what_a_hub_evicts_stays_matchable(fleet):
    small = fleet.hub(n_slots=8)
    member = small.join()
    fleet.until(lambda: small.follower.hubs == 1, "the hub has joined")
    texts = [tokens(seed, 2 * CHUNK) for seed in range(10, 26)]
    for text in texts:
        store(small, member, text)
    assert [read(member, text) for text in texts] == [2 * CHUNK] * 16
    assert small.state.cache.forgotten == 0
    small.state.check_integrity()


def test_both_store_the_same_text_at_once(fleet, two):
    members = [hub.join() for hub in two]
    for member in members:
        member.store(TEXT)
    for hub in two:
        hub.settle()
    fleet.until_each_knows(6)
    assert [read(member) for member in members] == [len(TEXT)] * 2


def test_bytes_that_are_gone_are_a_miss_that_all_hear_of(fleet, two):
    one, other = two
    writer = one.join()
    store(one, writer)
    fleet.until_each_knows(3)
    for file in fleet.files():
        file.unlink()
    assert read(other.join()) == 0
    fleet.until(lambda: known(other) == 0, "the reader forgets what is gone")
    (index,) = one.state.indexes
    fleet.until(lambda: all(chunk.saved is Saved.NO for chunk in index.chunks()), "the writer hears of it")
    assert read(writer) == len(TEXT), "the writer still has it in its arena"
    assert count(other, "fleet_gone_chunks") == 3
    assert count(other, "store_failures") == 0
    other.state.check_integrity()


def test_changed_bytes_are_never_served(fleet, two):
    one, other = two
    store(one, one.join())
    fleet.until_each_knows(3)
    for file in fleet.files():
        content = bytearray(file.read_bytes())
        content[7] ^= 1
        file.write_bytes(content)
    assert read(other.join()) == 0
    assert count(other, "store_corrupted") == 3
    fleet.until(lambda: known(other) == 0, "the reader forgets what is damaged")


def test_clear_is_heard_by_all(fleet, two):
    one, _ = two
    member = one.join()
    store(one, member)
    fleet.until_each_knows(3)
    member.ask(wire.Clear)
    fleet.until_each_knows(0)
    fleet.until(lambda: not fleet.files(), "the bytes are removed")


def test_a_hub_that_falls_behind_the_log_reads_the_catalogue_again(make_hub, shared_server, tmp_path):
    fleet = Fleet(make_hub, shared_server, tmp_path / "place", log_length=8)
    one, other = fleet.hub(), fleet.hub()
    member = one.join()
    fleet.until(lambda: one.follower.hubs == other.follower.hubs == 2, "the hubs see each other")
    texts = [tokens(seed, CHUNK) for seed in range(100, 140)]
    for text in texts:  # meanwhile the other one applies nothing
        store(one, member, text)
    fleet.until_each_knows(40)
    assert count(other, "fleet_snapshots") >= 2
    assert read(other.join(), texts[0]) == CHUNK


def test_only_what_is_asked_for_again_goes_out(make_hub, shared_server, tmp_path):
    fleet = Fleet(make_hub, shared_server, tmp_path / "place", share="reused")
    one, other = fleet.hub(), fleet.hub()
    member = one.join()
    fleet.until(lambda: one.follower.hubs == other.follower.hubs == 2, "the hubs see each other")
    store(one, member)
    store(one, member, tokens(2, 3 * CHUNK))
    assert not fleet.files() and one.tier.saves.saved == 0
    read(member, TEXT[: 2 * CHUNK])
    one.settle()
    fleet.until(lambda: known(other) == 2, "what was read is published")
    assert read(other.join()) == 2 * CHUNK


def test_a_pace_is_kept_and_what_waits_takes_little_of_the_arena(make_hub, shared_server, tmp_path):
    per_second = 20 * namespace().slot_bytes
    fleet = Fleet(make_hub, shared_server, tmp_path / "place", rate_mib_s=per_second / 2**20)
    one = fleet.hub(n_slots=64)
    fleet.until(lambda: one.follower.hubs == 1, "the hub has joined")
    member, began = one.join(), time.monotonic()
    for seed in range(64):
        member.store(tokens(seed, CHUNK))
    assert one.tier.waiting <= 16
    assert count(one, "store_skipped") >= 64 - 16 - 20 * (time.monotonic() - began + 1)
    one.settle()
    sent = count(one, "fleet_sent_bytes")
    assert sent <= per_second * (time.monotonic() - began) + 16 * namespace().slot_bytes
    assert sent >= 16 * namespace().slot_bytes


def test_without_redis_hubs_go_on_alone_and_catch_up_by_themselves(make_hub, server, tmp_path):
    fleet = Fleet(make_hub, server, tmp_path / "place", deadline_s=1.0)
    one, other = fleet.hub(), fleet.hub()
    members = [one.join(), other.join()]
    fleet.until(lambda: one.follower.hubs == other.follower.hubs == 2, "the hubs see each other")
    store(one, members[0])
    fleet.until_each_knows(3)
    server.kill()
    alone = tokens(2, 2 * CHUNK)
    began = time.monotonic()
    for hub, member in zip((one, other), members, strict=True):
        store(hub, member, alone)
        assert read(member, alone) == 2 * CHUNK
        assert count(hub, "store_failures") > 0
    assert read(members[1]) == 0, "it cannot be fetched now"
    assert time.monotonic() - began < 20
    fleet.until(lambda: not other.follower.in_step, "the hub notices")
    server.start()
    store(one, members[0], tokens(3, CHUNK))
    fleet.until(lambda: one.follower.in_step and other.follower.in_step, "the hubs follow again")
    after = tokens(4, 2 * CHUNK)
    store(one, members[0], after)
    fleet.until(lambda: read(members[1], after) == 2 * CHUNK, "what came after is found")
    # Redis remembered nothing, so what only the fleet had is forgotten; what is in an arena is not.
    assert read(members[0]) == len(TEXT)
    assert count(other, "fleet_snapshots") >= 2
    for hub in (one, other):
        hub.state.check_integrity()


def test_with_its_append_only_file_redis_remembers(make_hub, tmp_path):
    with RedisServer(keeps=True) as server:
        fleet = Fleet(make_hub, server, tmp_path / "place", deadline_s=5.0)
        one, other = fleet.hub(), fleet.hub()
        fleet.until(lambda: one.follower.hubs == other.follower.hubs == 2, "the hubs see each other")
        store(one, one.join())
        fleet.until_each_knows(3)
        time.sleep(1.2)  # the file is written every second
        server.kill()
        server.start()
        fleet.until(lambda: count(other, "fleet_snapshots") >= 2, "the hub reads the catalogue again")
        fleet.until_each_knows(3)
        assert read(other.join()) == len(TEXT)


def test_a_hub_may_start_before_redis(make_hub, server, tmp_path):
    server.kill()
    fleet = Fleet(make_hub, server, tmp_path / "place", deadline_s=1.0)
    one = fleet.hub()
    member = one.join()
    store(one, member)
    assert read(member) == len(TEXT)
    server.start()
    fleet.until(lambda: one.follower.hubs == 1, "the hub joins")
    store(one, member, tokens(2, CHUNK))
    assert len(fleet.files()) == 1


def test_a_frozen_redis_delays_no_request(make_hub, server, tmp_path):
    fleet = Fleet(make_hub, server, tmp_path / "place", deadline_s=0.5)
    one, other = fleet.hub(), fleet.hub()
    members = [one.join(), other.join()]
    fleet.until(lambda: one.follower.hubs == other.follower.hubs == 2, "the hubs see each other")
    store(one, members[0])
    fleet.until_each_knows(3)
    server.freeze()
    thawing = threading.Timer(3.0, server.thaw)
    thawing.start()
    slowest = 0.0
    for seed in range(50, 60):
        began = time.monotonic()
        members[0].store(tokens(seed, CHUNK))
        members[1].lookup(TEXT, acquire=False)
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 0.5, "a request waited for Redis"
    thawing.join()
    fleet.until(lambda: one.follower.in_step and other.follower.in_step, "the hubs follow again")
    fleet.until(lambda: read(members[1]) == len(TEXT), "the other hub's chunks come again")


def test_a_full_redis_costs_sharing_alone(make_hub, server, tmp_path):
    fleet = Fleet(make_hub, server, tmp_path / "place")
    one, other = fleet.hub(), fleet.hub()
    members = [one.join(), other.join()]
    fleet.until(lambda: one.follower.hubs == other.follower.hubs == 2, "the hubs see each other")
    store(one, members[0])
    fleet.until_each_knows(3)
    server.client().config_set("maxmemory", "1kb")
    more = tokens(2, 2 * CHUNK)
    store(one, members[0], more)
    assert count(one, "store_failures") > 0 and known(other) == 3
    assert read(members[0], more) == 2 * CHUNK
    assert read(members[1]) == len(TEXT), "what is catalogued is still fetched"
    fleet.until(lambda: one.follower.in_step and other.follower.in_step, "following goes on")
    server.client().config_set("maxmemory", "0")
    time.sleep(0.6)
    store(one, members[0], tokens(3, 2 * CHUNK))
    fleet.until(lambda: known(other) == 5, "sharing goes on")
    for hub in (one, other):
        hub.state.check_integrity()


def test_what_is_no_hub_s_run_is_skipped_and_counted(fleet, two):
    one, other = two
    odd = RunKey("5eed", "odd")
    one.tier.store.save_run(StoredRun(odd, bytes(4 * CHUNK), b"not a description", ()))
    one.tier.store.save(odd, Span(0, CHUNK), [one.arena.slot(0, 64)])
    fleet.until(lambda: count(other, "fleet_refused_runs") == 1, "the odd run comes")
    store(one, one.join())
    fleet.until(lambda: known(other) == 3, "what comes after it is taken")


def test_other_models_of_the_group_are_kept_apart(fleet, two):
    one, other = two
    store(one, one.join(namespace=namespace("another model")))
    fleet.until_each_knows(3)
    assert read(other.join()) == 0


def test_a_lost_chunk_in_the_middle_can_come_again(fleet, two):
    one, other = two
    reserved = store(one, one.join())
    fleet.until_each_knows(3)
    chunk = one.state.indexes.get(namespace().digest).runs[reserved.run].chunks[CHUNK]
    other.tier.store.discard(chunk.run.key, chunk.span)
    fleet.until(lambda: chunk.saved is Saved.NO, "its owner hears that it is gone")
    other_index = other.state.indexes.get(namespace().digest)
    other.tier.forget([(chunk.run.key, chunk.span)])
    one.run(save(one, chunk))
    one.settle()
    fleet.until_each_knows(3)
    assert read(other.join()) == len(TEXT)
    assert len(other_index.named(chunk.run.key)) == 2


async def save(hub, chunk):
    hub.tier.save(chunk.run, TEXT, [chunk])
