"""Hubs that share a store find each other's chunks."""

import time

import msgspec
import numpy as np
import pytest
from blendhub_fleet.records import decode_record, encode_record, encode_spans

from blendhub.contracts import RunKey, StoredRun
from blendhub.core.spans import Span
from harness.servers.redis_server import RedisServer, needs_redis
from tests.hub.fleet_direct import TEXT, Fleet, count, known, read, store
from tests.hub.hub_direct import CHUNK, namespace, tokens

pytestmark = [pytest.mark.slow, needs_redis]


@pytest.fixture(scope="module")
def shared_server():
    with RedisServer() as server:
        yield server


@pytest.fixture
def fleet(make_hub, shared_server, tmp_path):
    return Fleet(make_hub, shared_server, tmp_path / "place")


@pytest.fixture
def two(fleet):
    return fleet.pair()


def test_what_one_hub_stores_is_found_and_read_on_the_other(fleet, two):
    one, other = two
    store(one, one.join())
    fleet.until_each_knows(3)
    member = other.join()
    assert read(member) == len(TEXT)
    assert all(match.exact for match in member.read(TEXT).matches)
    assert count(other, "fleet_fetched_bytes") == count(one, "fleet_sent_bytes") == 3 * namespace().slot_bytes
    assert count(other, "fleet_published_chunks") == 3 and count(one, "fleet_published_chunks") == 0


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
    fleet.until(lambda: not any(chunk.in_store for chunk in index.chunks()), "the writer hears of it")
    assert read(writer) == len(TEXT), "the writer still has it in its arena"
    assert count(other, "fleet_gone_chunks") == 3
    assert count(other, "store_failures") == 0
    other.state.check_integrity()


def test_a_hub_that_falls_behind_the_log_reads_the_catalogue_again(make_hub, shared_server, tmp_path):
    fleet = Fleet(make_hub, shared_server, tmp_path / "place", log_length=8)
    one, other = fleet.pair()
    member = one.join()
    texts = [tokens(seed, CHUNK) for seed in range(100, 140)]
    for text in texts:  # meanwhile the other one applies nothing
        store(one, member, text)
    fleet.until_each_knows(40)
    assert count(other, "fleet_snapshots") >= 2
    assert read(other.join(), texts[0]) == CHUNK


def test_only_what_is_asked_for_again_goes_out(make_hub, shared_server, tmp_path):
    fleet = Fleet(make_hub, shared_server, tmp_path / "place", share="reused")
    one, other = fleet.pair()
    member = one.join()
    store(one, member)
    store(one, member, tokens(2, 3 * CHUNK))
    assert not fleet.files() and one.tier.writer.saved == 0
    read(member, TEXT[: 2 * CHUNK])
    one.settle()
    fleet.until(lambda: known(other) == 2, "what was read is published")
    assert read(other.join()) == 2 * CHUNK


def test_a_pace_is_kept_and_what_is_evicted_before_its_turn_is_not_sent(make_hub, shared_server, tmp_path):
    per_second = 20 * namespace().slot_bytes
    fleet = Fleet(make_hub, shared_server, tmp_path / "place", rate_mib_s=per_second / 2**20)
    one = fleet.hub(n_slots=16)
    fleet.until(lambda: one.follower.hubs == 1, "the hub has joined")
    member, began = one.join(), time.monotonic()
    for seed in range(64):
        member.store(tokens(seed, CHUNK))
    one.settle()
    sent = count(one, "fleet_sent_bytes")
    assert 16 * namespace().slot_bytes <= sent <= per_second * (time.monotonic() - began + 1)
    assert count(one, "store_skipped") == 64 - sent // namespace().slot_bytes


def test_what_is_no_hub_s_run_is_skipped_and_counted(fleet, two):
    one, other = two
    odd = RunKey("5eed", "odd")
    one.tier.store.save_run(StoredRun(odd, bytes(4 * CHUNK), b"not a description", ()))
    one.tier.store.save(odd, Span(0, CHUNK), [one.arena.slot(0, 64)])
    fleet.until(lambda: count(other, "fleet_refused_runs") == 1, "the odd run comes")
    store(one, one.join())
    fleet.until(lambda: known(other) == 3, "what comes after it is taken")


def test_a_record_of_other_sizes_costs_its_own_chunk_and_is_dropped_for_all(fleet, two, shared_server):
    one, other = two
    store(one, one.join())
    fleet.until_each_knows(3)
    redis = shared_server.client()
    (run,) = redis.scan_iter(f"blendhub:{{{fleet.group}}}:run:*")
    record = decode_record(redis.hget(run, encode_spans([Span(0, CHUNK)])))
    bad = msgspec.structs.replace(record, sizes=(4,))
    redis.hset(run, encode_spans([Span(0, CHUNK)]), encode_record(bad))
    member = other.join()
    assert read(member) == 2 * CHUNK
    fleet.until(lambda: known(other) == 2, "the reader forgets it")
    (index,) = one.state.indexes
    fleet.until(lambda: not all(chunk.in_store for chunk in index.chunks()), "the writer hears of it")
    assert read(member) == 2 * CHUNK and count(other, "store_failures") == 1
