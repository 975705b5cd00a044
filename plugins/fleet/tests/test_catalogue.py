"""The catalogue in Redis: what a hub began before the others took it for dead is never published; and
what no hub has written there costs itself alone: it is skipped, counted, and in nobody's way."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blendhub_fleet.directory import DirectoryBytes, open_store
from blendhub_fleet.options import DirectoryOptions
from blendhub_fleet.records import encode_name, encode_spans
from blendhub_fleet.scripts import MAX_TOKENS

from blendhub.core.errors import InvalidInput, OptionError, StoreFailed
from blendhub.testing.shared_stores.base import Join, chunk, content, key, run
from harness.servers.redis_server import RedisServer, needs_redis

pytestmark = needs_redis
FENCED = "took this hub for dead"


def opened(url: str, path: Path, **options: Any):
    return open_store(DirectoryOptions(catalogue=url, path=str(path), deadline_s=10.0, **options))


def test_a_password_is_part_of_the_url_and_never_of_an_error(tmp_path: Path) -> None:
    with RedisServer("--requirepass", "sesame") as server:
        url = server.url.replace("unix://", "unix://:{}@")
        right, wrong = (opened(url.format(word), tmp_path) for word in ("sesame", "guessed"))
        assert list(right.runs()) == []
        with pytest.raises(StoreFailed) as refused:
            wrong.snapshot()
        assert "sesame" not in str(refused.value) and "guessed" not in str(refused.value)
        for store in (right, wrong):
            store.close()


def test_options_that_cannot_work_are_refused_at_once(tmp_path: Path) -> None:
    for url in ("", "HOST:6379", "http://HOST", "redis://HOST:port"):
        with pytest.raises(OptionError, match="catalogue"):
            opened(url, tmp_path)
    with pytest.raises(OptionError, match="needs path"):
        open_store(DirectoryOptions())
    with pytest.raises(OptionError, match="unix_group: this machine has no group 'nosuch'"):
        open_store(DirectoryOptions(path="/mnt/kv", unix_group="nosuch"))


# Taken for dead.


@pytest.fixture
def redis(redis_server: RedisServer) -> Any:
    return redis_server.client()


@pytest.fixture
def take_for_dead(redis: Any, prefix: str) -> Callable[[], object]:
    """Does what the others do with a hub that was silent for long."""
    return lambda: redis.delete(prefix + "members")


def test_one_that_was_taken_for_dead_publishes_nothing_until_it_has_joined_again(
    join: Join, place: Path, take_for_dead: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = join(), join()
    one.save("a", 0, 1)
    take_for_dead()
    one.store.save_run(run("a"))
    with pytest.raises(StoreFailed, match=FENCED):
        one.store.save(key("a"), chunk(1), [one.slot(0)])
    one.follow()
    put = DirectoryBytes.put

    def put_while_it_dies_and_returns(place: DirectoryBytes, *given: Any) -> list[bool]:
        stored = put(place, *given)
        take_for_dead()
        one.follow()
        return stored

    with monkeypatch.context() as dying, pytest.raises(StoreFailed, match=FENCED):
        dying.setattr(DirectoryBytes, "put", put_while_it_dies_and_returns)
        one.store.save(key("a"), chunk(1), [one.slot(0)])
    other.follow()
    assert other.catalogue == {key("a"): {chunk(0)}}
    assert len(list(place.rglob("*.kv"))) == 1, "the bytes of what was refused are removed"
    one.save("a", 1, 2)
    other.follow()
    assert other.catalogue == {key("a"): {chunk(0), chunk(1)}} and other.load("a", 1) == [content(2)]


def test_the_silent_are_taken_for_dead_by_redis_clock(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blendhub_fleet.catalogue.MEMBER_S", 0.3)
    one, other = join(), join()
    found = other.store.changes(other._cursor, 0.0)
    assert found.hubs == 2
    time.sleep(0.5)
    assert other.store.changes(found.cursor, 0.0).hubs == 1
    one.store.save_run(run("a"))
    with pytest.raises(StoreFailed, match=FENCED):
        one.store.save(key("a"), chunk(0), [one.slot(0)])


# Strangers.

LARGE = 4 * 2**20


@pytest.fixture
def at(prefix: str) -> Callable[..., bytes]:
    """The key of a kind, and of a run."""
    return lambda kind, name=None: f"{prefix}{kind}".encode() + (encode_name(key(name)) if name is not None else b"")


def test_a_run_that_no_hub_wrote_is_left_out_and_the_others_come(redis: Any, join: Join, at: Any) -> None:
    writer = join()
    for name in range(6):
        writer.save(name, 0, name)
    for name, kind in ((0, "run:"), (1, "tok:")):
        redis.delete(at(kind, name))
        redis.lpush(at(kind, name), "of another type")
    redis.setrange(at("tok:", 2), 200 * 2**20, b"far too many")
    redis.hset(at("run:", 3), "a", bytes(LARGE))
    redis.delete(at("tok:", 4))
    redis.zadd(at("runs"), {b"\xff": 1})
    began = time.monotonic()
    other = join()
    assert set(other.catalogue) == {key(5)} and other.load(5, 0) == [content(5)]
    assert other.store.figures()["skipped_entries"] == 6
    writer.save("c", 0, 3)
    other.follow()
    assert key("c") in other.catalogue
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize("where", ["next", "behind the last change", "in place of the log"])
def test_a_log_entry_that_no_hub_wrote_is_left_out_and_following_goes_on(
    redis: Any, join: Join, at: Any, where: str
) -> None:
    writer, other = join(), join()
    writer.save("a", 0, 1)
    span, change = encode_spans([chunk(0)]), {"w": "x", "k": "d", "r": encode_name(key("a"))}
    if where == "next":
        for fields in ({"x": "y"}, {**change, "k": "?", "s": span}, {**change, "r": b"\xff", "s": span},
                       {**change, "s": bytes(LARGE)}):  # fmt: skip
            redis.xadd(at("log"), fields, id=f"{redis.incr(at('seq'))}-0")
    elif where == "behind the last change":
        redis.xadd(at("log"), {"x": "y"})
    else:
        redis.delete(at("log"))
        redis.lpush(at("log"), "x")
    other.follow()
    writer.save("b", 0, 2)
    other.follow()
    assert other.catalogue == {key("a"): {chunk(0)}, key("b"): {chunk(0)}}
    assert other.store.figures()["skipped_entries"] == (4 if where == "next" else 0)
    assert other.wait_for_changes(0.2) >= 0.2, "it does not ask again and again"


def test_a_bad_record_is_dropped_for_all_and_what_comes_with_it_is_loaded(redis: Any, join: Join, at: Any) -> None:
    writer, reader = join(), join()
    writer.save_batch("a", {index: index for index in range(5)})
    writer.save("b", 0, 3)
    reader.follow()
    for index, record in enumerate(
        (
            b"no record",
            b"-1:" + msgspec.msgpack.encode(("0" * 32, (-1,), (bytes(16),))),
            b"4096:" + msgspec.msgpack.encode(("../../escaped", (4096,), (bytes(16),))),
            bytes(LARGE),
        )
    ):
        redis.hset(at("run:", "a"), encode_spans([chunk(index)]), record)
    redis.delete(at("run:", "b"))
    redis.lpush(at("run:", "b"), "of another type")
    wanted = [(key("a"), chunk(index), [reader.slot(index)]) for index in range(5)]
    wanted.append((key("b"), chunk(0), [reader.slot(0)]))
    for _ in range(2):
        assert reader.store.load_chunks(wanted) == [False] * 4 + [True, False]
        assert bytes(reader.slot(4)) == content(4) and reader.store.corrupted == 4
    writer.follow()
    assert writer.catalogue[key("a")] == {chunk(4)}


def test_what_a_stranger_wrote_makes_room_like_anything_else(redis: Any, join: Join, at: Any) -> None:
    writer = join(capacity_gib=20_000 / 2**30)
    writer.save("a", 0, 1)
    writer.save("b", 0, 1)
    redis.hset(at("run:", "a"), mapping={"n": "many", encode_spans([chunk(0)]): b"no record"})
    redis.delete(at("run:", "b"))
    redis.lpush(at("run:", "b"), "of another type")
    for name in range(8):
        writer.save(name, 0, name)
    assert writer.load(7, 0) == [content(7)]
    writer.save("b", 0, 9)
    assert writer.load("b", 0) == [content(9)], "its place can be used again"
    with pytest.raises(InvalidInput, match="tokens"):  # longer than what any other hub reads
        writer.store.save_run(msgspec.structs.replace(run("a"), tokens=bytes(4 * (MAX_TOKENS + 1))))
