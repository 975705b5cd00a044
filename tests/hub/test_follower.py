"""Hubs that share a store find each other's chunks, delete for each other, and go on alone while Redis or the shared
directory does not answer."""

import asyncio
import secrets
import time

import msgspec
import numpy as np
import pytest
from blendhub_fleet.directory import open_store
from blendhub_fleet.options import DirectoryOptions
from blendhub_fleet.records import decode_record, encode_record, encode_spans

from blendhub.client import wire
from blendhub.contracts import RunKey, StoredRun
from blendhub.core.errors import Busy
from blendhub.core.layout import Variant
from blendhub.core.provenance import Provenance
from blendhub.core.spans import Span
from blendhub.hub.limits import CHUNKS_A_PIECE
from harness.servers.redis_server import RedisServer, needs_redis
from tests.hub.hub_direct import CHUNK, namespace, tokens
from tests.hub.test_segments import SPACE, moved, store_segment

pytestmark = [pytest.mark.slow, needs_redis]
TEXT = tokens(1, 3 * CHUNK)
SOON_S = 60.0
"""Far more than it takes, on a machine that is busy with other tests."""


class Fleet:
    """Hubs of one group, which run when they are asked to."""

    def __init__(self, make_hub, server, path):
        self.make_hub, self.server, self.path = make_hub, server, path
        self.group = f"group-{secrets.token_hex(4)}"
        self.hubs = []

    def join(self, n_hubs=2, n_slots=32, **options):
        """Hubs that see each other."""
        settings = {"catalogue": self.server.url, "group": self.group, "path": str(self.path), "deadline_s": 10.0}
        self.options = DirectoryOptions(**settings | options)
        self.hubs += [self.make_hub(n_slots, lambda: open_store(self.options)) for _ in range(n_hubs)]
        self.until(lambda: all(hub.follower.hubs == len(self.hubs) for hub in self.hubs), "the hubs see each other")
        return self.hubs

    def until(self, condition, what):
        """Let all hubs run until the condition holds."""
        deadline = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {SOON_S:.0f} s"
            for hub in self.hubs:
                hub.run(asyncio.sleep(0.002))

    def until_each_knows(self, n_chunks):
        self.until(lambda: all(known(hub) == n_chunks for hub in self.hubs), f"every hub knows {n_chunks} chunks")

    def files(self):
        return list(self.path.rglob("*.kv"))


def known(hub):
    return sum(index.n_chunks for index in hub.state.indexes)


def store(member, text=TEXT, **more):
    """Store a text, and wait until it was offered to the fleet."""
    reserved = member.store(text, **more)
    member.hub.settle()
    return reserved


def count(hub, name):
    return hub.service.stats().counters[name]


@pytest.fixture(scope="module")
def shared_server():
    with RedisServer() as server:
        yield server


@pytest.fixture
def fleet(make_hub, shared_server, tmp_path):
    return Fleet(make_hub, shared_server, tmp_path / "place")


def test_what_one_hub_stores_is_found_on_the_other_and_bytes_that_are_gone_are_a_miss_that_all_hear_of(fleet):
    one, other = fleet.join()
    first, member = one.join(), other.join()
    store(first)
    fleet.until_each_knows(3)
    (foreign,) = other.index.runs
    assert member.read(TEXT) == len(TEXT)
    assert all(match.exact for match in member.lookup(TEXT, acquire=False).matches)
    assert count(other, "fleet_fetched_bytes") == count(one, "fleet_sent_bytes") == 3 * namespace().slot_bytes
    assert count(other, "fleet_published_chunks") == 3 and count(one, "fleet_published_chunks") == 0
    longer = np.concatenate([TEXT, tokens(9, 2 * CHUNK)])
    assert store(member, longer, run=foreign).run != foreign, "a run grows only where it was computed"
    fleet.until_each_knows(5)
    assert first.read(longer) == len(longer)
    store(first, tokens(2, 2 * CHUNK))
    fleet.until_each_knows(7)
    for file in fleet.files():
        file.unlink()
    assert member.read(tokens(2, 2 * CHUNK)) == 0
    fleet.until(lambda: known(other) == 5, "the reader forgets what is gone")
    fleet.until(lambda: sum(chunk.in_store for chunk in one.index.chunks()) == 5, "the writer hears of it")
    assert first.read(tokens(2, 2 * CHUNK)) == 2 * CHUNK, "the writer still has it in its arena"
    assert count(other, "fleet_gone_chunks") == 2 and count(other, "store_failures") == 0


def test_a_segment_that_one_hub_stores_moves_with_its_map_on_the_other(fleet):
    """It comes in several pieces, of which each hub may hear in any order."""
    one, other = fleet.join()
    text = tokens(1, (CHUNKS_A_PIECE + 3) * CHUNK + 5)
    store_segment(one.join(namespace=SPACE), text, 7, len(text))
    one.settle()
    fleet.until_each_knows(CHUNKS_A_PIECE + 4)
    prompt = np.concatenate([tokens(2, 60), text[7:]])
    assert moved(other.join(namespace=SPACE), prompt, wait_s=10.0) == [Span(60, len(prompt))]


def test_only_what_is_asked_for_again_goes_out(fleet):
    one, other = fleet.join(share="reused")
    member, reader = one.join(), other.join()
    store(member, provenance=Provenance(donates_from=CHUNK))
    store(member, tokens(2, 3 * CHUNK))
    assert not fleet.files() and one.tier.writer.saved == 0
    member.read(TEXT[: 2 * CHUNK])
    one.settle()
    fleet.until(lambda: known(other) == 2, "what was read is published")
    assert reader.read(TEXT) == 2 * CHUNK
    (moved,) = reader.lookup(np.concatenate([tokens(3, 20), TEXT]), acquire=False).matches
    assert (moved.span, moved.source_start) == (Span(20 + CHUNK, 20 + 2 * CHUNK), CHUNK), "it stays there, too"


def test_a_pace_is_kept_and_what_is_evicted_before_its_turn_is_not_sent(fleet):
    per_second = 20 * namespace().slot_bytes
    (one,) = fleet.join(n_hubs=1, n_slots=16, rate_mib_s=per_second / 2**20)
    member, began = one.join(), time.monotonic()
    for seed in range(64):
        member.store(tokens(seed, CHUNK))
    one.settle()
    sent = count(one, "fleet_sent_bytes")
    assert 16 * namespace().slot_bytes <= sent <= per_second * (time.monotonic() - began + 1)
    assert count(one, "store_skipped") == 64 - sent // namespace().slot_bytes


def test_what_is_no_hub_s_run_is_skipped_and_a_record_of_other_sizes_dropped_for_all(fleet):
    one, other = fleet.join()
    odd = RunKey("5eed", "odd")
    one.tier.store.save_run(StoredRun(odd, bytes(4 * CHUNK), b"not a description", ()))
    one.tier.store.save(odd, Span(0, CHUNK), [one.arena.slot(0, 64)])
    fleet.until(lambda: count(other, "fleet_refused_runs") == 1, "the odd run comes")
    store(one.join())
    fleet.until(lambda: known(other) == 3, "what comes after it is taken")
    redis, span = fleet.server.client(), encode_spans([Span(0, CHUNK)])
    runs = redis.scan_iter(f"blendhub:{{{fleet.group}}}:run:*")
    (run,) = [name for name in runs if b"odd" not in name]
    record = decode_record(redis.hget(run, span))
    redis.hset(run, span, encode_record(msgspec.structs.replace(record, sizes=(4,))))
    member = other.join()
    assert member.read(TEXT) == 2 * CHUNK
    fleet.until(lambda: known(other) == 2, "the reader forgets it")
    fleet.until(lambda: not all(chunk.in_store for chunk in one.index.chunks()), "the writer hears of it")
    assert member.read(TEXT) == 2 * CHUNK and count(other, "store_failures") == 1


def test_all_hubs_delete_a_salt_also_from_their_arenas(fleet):
    salt = Variant(cache_salt="a")
    one, other = fleet.join()
    store(one.join(), variant=salt)
    store(one.join("another"), tokens(3, CHUNK), variant=Variant(cache_salt="b"))
    fleet.until_each_knows(4)
    reader = other.join()
    assert reader.read(TEXT, salt) == len(TEXT)
    # The hub that is asked is not the one that computed it.
    other.ask(wire.Forget("a"))
    fleet.until_each_knows(1)
    assert len(fleet.files()) == 1 and reader.read(TEXT, salt) == 0
    # A hub that knows nothing of it tells the others all the same.
    one.join("third").store(tokens(4, CHUNK), variant=Variant(cache_salt="late"))
    other.ask(wire.Forget("late"))
    one.settle()
    fleet.until_each_knows(1)
    # A hub that does not know yet what there is cannot say that it has deleted it.
    late = fleet.make_hub(4, lambda: open_store(fleet.options))
    with pytest.raises(Busy, match="has yet to read"):
        late.ask(wire.Forget("b"))
    fleet.hubs.append(late)
    fleet.until_each_knows(1)
    fleet.until(lambda: late.follower.in_step, "it has read all")
    late.ask(wire.Forget("b"))
    fleet.until_each_knows(0)


def test_without_redis_hubs_go_on_alone_and_catch_up_by_themselves(make_hub, tmp_path):
    with RedisServer() as server:
        fleet = Fleet(make_hub, server, tmp_path / "place")
        one, other = fleet.join(deadline_s=1.0)
        server.kill()
        members = [one.join(), other.join()]
        store(members[0])
        assert members[0].read(TEXT) == len(TEXT)
        server.start()
        fleet.until_each_knows(3)  # what was stored before is sent as well
        server.kill()
        alone = tokens(2, 2 * CHUNK)
        for member in members:
            store(member, alone)
            assert member.read(alone) == 2 * CHUNK
            assert count(member.hub, "store_failures") > 0
        assert members[1].read(TEXT) == 0, "it cannot be fetched now"
        fleet.until(lambda: not other.follower.in_step, "the hub notices")
        server.start()
        store(members[0], tokens(3, CHUNK))
        fleet.until(lambda: one.follower.in_step and other.follower.in_step, "the hubs follow again")
        # Redis remembered nothing, so what only the fleet had is forgotten; what is in an arena is not, and what was
        # stored meanwhile is sent now: the text that both have, and one more chunk.
        fleet.until(lambda: known(other) == 2 + 2 + 1, "the other hub forgets the three chunks from before")
        assert members[1].read(tokens(3, CHUNK)) == CHUNK
        assert members[0].read(TEXT) == len(TEXT)
