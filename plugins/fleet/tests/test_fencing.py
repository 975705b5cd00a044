"""What an object began before the others took it for dead is never published; what it begins after is."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blendhub_fleet.directory import DirectoryBytes

from blendhub.core.errors import StoreFailed
from blendhub.testing.shared_stores.base import Join, chunk, content, key, run
from harness.servers.redis_server import RedisServer, needs_redis

pytestmark = needs_redis


@pytest.fixture
def redis(redis_server: RedisServer) -> Any:
    return redis_server.client()


@pytest.fixture
def take_for_dead(redis: Any, prefix: str) -> Callable[[], object]:
    """Does what the others do with a hub that was silent for long."""
    return lambda: redis.delete(prefix + "members")


def test_one_that_was_taken_for_dead_publishes_nothing_until_it_has_joined_again(
    join: Join, place: Path, take_for_dead: Callable[[], object]
) -> None:
    one, other = join(), join()
    one.save("a", 0, 1)
    take_for_dead()
    one.store.save_run(run("a"))
    with pytest.raises(StoreFailed, match="took this hub for dead"):
        one.store.save(key("a"), chunk(1), [one.slot(0)])
    other.follow()
    assert other.catalogue == {key("a"): {chunk(0)}}
    assert len(list(place.rglob("*.kv"))) == 1, "the bytes of what was refused are removed"
    one.follow()
    one.save("a", 1, 2)
    other.follow()
    assert other.catalogue == {key("a"): {chunk(0), chunk(1)}}
    assert other.load("a", 1) == [content(2)]


def test_what_was_on_its_way_is_refused_although_its_writer_has_joined_again(
    join: Join, place: Path, take_for_dead: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = join(), join()
    put = DirectoryBytes.put

    def put_while_it_dies_and_returns(place: DirectoryBytes, *given: Any) -> list[bool]:
        stored = put(place, *given)
        take_for_dead()
        one.follow()
        return stored

    monkeypatch.setattr(DirectoryBytes, "put", put_while_it_dies_and_returns)
    one.store.save_run(run("a"))
    with pytest.raises(StoreFailed, match="took this hub for dead"):
        one.store.save(key("a"), chunk(0), [one.slot(0)])
    other.follow()
    assert other.catalogue == {} and not list(place.rglob("*.kv"))


def test_the_silent_are_taken_for_dead_by_redis_clock(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blendhub_fleet.catalogue.MEMBER_S", 0.3)
    one, other = join(), join()
    found = other.store.changes(other._cursor, 0.0)
    assert found.hubs == 2
    time.sleep(0.5)
    assert other.store.changes(found.cursor, 0.0).hubs == 1
    one.store.save_run(run("a"))
    with pytest.raises(StoreFailed, match="took this hub for dead"):
        one.store.save(key("a"), chunk(0), [one.slot(0)])


def test_a_redis_that_was_emptied_is_noticed_however_far_it_has_gone_on(join: Join, redis: Any, prefix: str) -> None:
    one, other = join(), join()
    one.save("a", 0, 1)
    other.follow()
    redis.delete(*redis.scan_iter(prefix + "*"))
    one.follow()
    for index in range(4):
        one.save("b", index, index)
    other.follow()
    assert other.lost == 1
    assert other.catalogue == one.catalogue == {key("b"): {chunk(index) for index in range(4)}}
