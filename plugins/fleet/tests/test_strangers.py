"""What no hub has written into the catalogue costs itself alone: it is skipped, counted, and in nobody's way."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
from blendhub_fleet.records import encode_name, encode_spans
from blendhub_fleet.scripts import MOST_TOKENS

from blendhub.core.errors import InvalidInput
from blendhub.testing.shared_stores.base import Join, Member, chunk, content, key, run
from harness.servers.redis_server import RedisServer, needs_redis

pytestmark = needs_redis

LARGE = 4 * 2**20
NAME = encode_name(key("a"))
PREFIX = "blendhub:{strangers}:"
Stranger = Callable[[Any], object]
"""Writes into the catalogue, whose run "a" has one chunk, or two."""


@pytest.fixture
def redis(redis_server: RedisServer) -> Iterator[Any]:
    client = redis_server.client()
    yield client
    for name in client.scan_iter(PREFIX + "*"):
        client.delete(name)


@pytest.fixture
def join(join: Join) -> Join:
    return partial(join, group="strangers")


def at(kind: str, name: bytes = NAME) -> bytes:
    return (PREFIX + kind).encode() + name


def a_list_at(name: bytes) -> Stranger:
    def put(redis: Any) -> None:
        redis.delete(name)
        redis.lpush(name, "x")

    return put


def log_entry(number: str, fields: dict[str, Any]) -> Stranger:
    """The next change of the log, or what stands behind the last one."""

    def add(redis: Any) -> None:
        seq = redis.incr(PREFIX + "seq") if number == "next" else 0
        redis.xadd(PREFIX + "log", fields, id=f"{seq}-0" if seq else number)

    return add


RUNS = {
    "a run of another type": a_list_at(at("run:")),
    "tokens of another type": a_list_at(at("tok:")),
    "tokens that are far too many": lambda redis: redis.setrange(at("tok:"), 200 * 2**20, b"x"),
    "a description that is far too long": lambda redis: redis.hset(at("run:"), "a", bytes(LARGE)),
    "no tokens": lambda redis: redis.delete(at("tok:")),
    "a name that is none": lambda redis: redis.zadd(PREFIX + "runs", {b"\xff": 1}),
}

ENTRIES = {
    "without the fields of a change": log_entry("next", {"x": "y"}),
    "of no kind": log_entry("next", {"w": "x", "k": "?", "r": NAME, "s": encode_spans([chunk(0)])}),
    "of a run that has no name": log_entry("next", {"w": "x", "k": "d", "r": b"\xff", "s": encode_spans([chunk(0)])}),
    "far too long": log_entry("next", {"w": "x", "k": "d", "r": NAME, "s": bytes(LARGE)}),
    "behind the last change": log_entry("*", {"x": "y"}),
    "in place of the log": a_list_at((PREFIX + "log").encode()),
}


def skipped(member: Member) -> float:
    return member.store.figures()["skipped_entries"]


@pytest.mark.parametrize("stranger", RUNS.values(), ids=RUNS)
def test_a_run_that_no_hub_wrote_is_left_out_and_the_others_come(redis: Any, join: Join, stranger: Stranger) -> None:
    writer = join()
    writer.save("a", 0, 1)
    writer.save("b", 0, 2)
    stranger(redis)
    began = time.monotonic()
    other = join()
    assert key("b") in other.catalogue and other.load("b", 0) == [content(2)]
    assert skipped(other) == 1
    writer.save("c", 0, 3)
    other.follow()
    assert key("c") in other.catalogue
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize("stranger", ENTRIES.values(), ids=ENTRIES)
def test_a_log_entry_that_no_hub_wrote_is_left_out_and_following_goes_on(
    redis: Any, join: Join, stranger: Stranger
) -> None:
    writer, other = join(), join()
    writer.save("a", 0, 1)
    stranger(redis)
    other.follow()
    writer.save("b", 0, 2)
    other.follow()
    assert other.catalogue == {key("a"): {chunk(0)}, key("b"): {chunk(0)}}
    assert other.lost + skipped(other) <= 1
    assert other.wait_for_changes(0.2) >= 0.2, "it does not ask again and again"


RECORDS = {
    "no record": b"no record",
    "a size below zero": b"-1:" + msgspec.msgpack.encode(("0" * 32, (-1,), (bytes(16),))),
    "more sizes than checksums": b"8192:" + msgspec.msgpack.encode(("0" * 32, (4096, 4096), (bytes(16),))),
    "a name that leads elsewhere": b"4096:" + msgspec.msgpack.encode(("../../escaped", (4096,), (bytes(16),))),
    "far too long": bytes(LARGE),
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_bad_record_is_dropped_for_all_and_what_comes_with_it_is_loaded(
    redis: Any, join: Join, record: bytes
) -> None:
    writer, reader = join(), join()
    writer.save_batch("a", {0: 1, 1: 2})
    writer.save("b", 0, 3)
    reader.follow()
    redis.hset(at("run:"), encode_spans([chunk(0)]), record)
    a_list_at(at("run:", encode_name(key("b"))))(redis)
    chunks = [(key(name), chunk(index), [reader.slot(index)]) for name, index in (("a", 0), ("a", 1), ("b", 0))]
    assert reader.store.load_chunks(chunks) == [False, True, False]
    assert bytes(reader.slot(1)) == content(2)
    assert reader.store.corrupted == 1
    writer.follow()
    assert writer.catalogue[key("a")] == {chunk(1)}
    assert reader.store.load_chunks(chunks) == [False, True, False] and reader.store.corrupted == 1


@pytest.mark.parametrize(
    "stranger",
    [
        a_list_at(at("run:")),
        lambda redis: redis.hset(at("run:"), mapping={"n": "many", encode_spans([chunk(0)]): b"no record"}),
    ],
    ids=["a run of another type", "bytes that are no number"],
)
def test_what_a_stranger_wrote_makes_room_like_anything_else(redis: Any, join: Join, stranger: Stranger) -> None:
    writer = join(capacity_gib=20_000 / 2**30)
    writer.save("a", 0, 1)
    stranger(redis)
    for name in range(8):
        writer.save(name, 0, name)
    assert writer.load(7, 0) == [content(7)]
    writer.save("a", 0, 9)
    assert writer.load("a", 0) == [content(9)], "its place can be used again"


def test_a_run_longer_than_any_other_hub_reads_is_not_published(join: Join) -> None:
    long = msgspec.structs.replace(run("a"), tokens=bytes(4 * (MOST_TOKENS + 1)))
    with pytest.raises(InvalidInput, match="tokens"):
        join().store.save_run(long)
