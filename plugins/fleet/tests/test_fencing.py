"""What an object began before the others took it for dead is never published; what it begins after is."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blendhub_fleet.directory import DirectoryBytes, Folder
from blendhub_fleet.options import DirectoryOptions
from blendhub_fleet.store import FleetStore

from blendhub.contracts import ArenaFile
from blendhub.core.errors import StoreFailed
from blendhub.testing.shared_stores.base import Member, chunk, content, key, run
from harness.servers.redis_server import RedisServer, needs_redis

pytestmark = needs_redis


class SlowBytes(DirectoryBytes):
    """Something happens while bytes are on their way."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def put(self, keys: list[str], extents: list[tuple[int, int]]) -> list[bool]:
        stored = super().put(keys, extents)
        self.meanwhile()
        return stored


class Fleet:
    """Members of one group, and what the others do to them."""

    def __init__(self, server: RedisServer, place: Path) -> None:
        self.redis = server.client()
        self.place = place
        self.options = DirectoryOptions(catalogue=server.url, group=place.parent.name, deadline_s=20.0)
        self.members: list[Member] = []

    def join(self) -> Member:
        def open_bytes(arena: ArenaFile) -> SlowBytes:
            return SlowBytes(Folder(self.place, None), arena, 30.0)

        self.members.append(Member(FleetStore(self.options, open_bytes)))
        return self.members[-1]

    def take_for_dead(self) -> None:
        """What the others do with a hub that was silent for long."""
        self.redis.delete(f"blendhub:{{{self.options.group}}}:members")

    def files(self) -> list[Path]:
        return list(self.place.rglob("*.kv"))


@pytest.fixture
def fleet(redis_server: RedisServer, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(redis_server, tmp_path / "place")
    yield made
    for member in made.members:
        member.close()


def test_one_that_was_taken_for_dead_publishes_nothing_until_it_has_joined_again(fleet: Fleet) -> None:
    one, other = fleet.join(), fleet.join()
    one.save("a", 0, 1)
    fleet.take_for_dead()
    one.store.save_run(run("a"))
    with pytest.raises(StoreFailed, match="took this hub for dead"):
        one.store.save(key("a"), chunk(1), [one.slot(0)])
    other.follow()
    assert other.known == {key("a"): {chunk(0)}}
    assert len(fleet.files()) == 1, "the bytes of what was refused are removed"
    one.follow()
    one.save("a", 1, 2)
    other.follow()
    assert other.known == {key("a"): {chunk(0), chunk(1)}}
    assert other.load("a", 1) == [content(2)]


def test_what_was_on_its_way_is_refused_although_its_writer_has_joined_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = fleet.join(), fleet.join()

    def die_and_return() -> None:
        fleet.take_for_dead()
        one.follow()

    monkeypatch.setattr(SlowBytes, "meanwhile", staticmethod(die_and_return))
    one.store.save_run(run("a"))
    with pytest.raises(StoreFailed, match="took this hub for dead"):
        one.store.save(key("a"), chunk(0), [one.slot(0)])
    other.follow()
    assert other.known == {} and fleet.files() == []


def test_the_silent_are_taken_for_dead_by_redis_clock(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blendhub_fleet.catalogue.MEMBER_S", 0.3)
    one, other = fleet.join(), fleet.join()
    found = other.store.changes(other._cursor, 0.0)
    assert found.hubs == 2
    time.sleep(0.5)
    assert other.store.changes(found.cursor, 0.0).hubs == 1
    one.store.save_run(run("a"))
    with pytest.raises(StoreFailed, match="took this hub for dead"):
        one.store.save(key("a"), chunk(0), [one.slot(0)])


def test_a_hub_with_an_older_clock_takes_part_like_any_other(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = fleet.join(), fleet.join()
    one.save("a", 0, 1)
    earlier = time.time() - 86_400
    monkeypatch.setattr(time, "time", lambda: earlier)
    late = fleet.join()
    late.save("b", 0, 2)
    for member in (one, other, late):
        member.follow()
        assert member.known == {key("a"): {chunk(0)}, key("b"): {chunk(0)}}
    late.discard("a", 0)
    other.follow()
    assert other.known == {key("b"): {chunk(0)}}


def test_a_redis_that_was_emptied_is_noticed_however_far_it_has_gone_on(fleet: Fleet) -> None:
    one, other = fleet.join(), fleet.join()
    one.save("a", 0, 1)
    other.follow()
    for name in fleet.redis.scan_iter(f"blendhub:{{{fleet.options.group}}}:*"):
        fleet.redis.delete(name)
    one.follow()
    for index in range(4):
        one.save("b", index, index)
    other.follow()
    assert other.lost == 1
    assert other.known == one.known == {key("b"): {chunk(index) for index in range(4)}}
