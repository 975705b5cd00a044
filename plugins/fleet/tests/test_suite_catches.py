"""A suite that nothing fails is worth nothing: shared stores with one fault each, and the test that must see it."""

import inspect
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blendhub_fleet.directory import DirectoryBytes, Folder
from blendhub_fleet.options import DirectoryOptions
from blendhub_fleet.store import FleetStore

from blendhub.contracts import ArenaFile, Changes, RunKey, SharedStore
from blendhub.core.errors import CursorLost
from blendhub.core.spans import Span
from blendhub.testing.shared_stores import SharedStoreSuite
from blendhub.testing.shared_stores.base import LONG_LOG, ROOMY, Member
from harness.servers.redis_server import RedisServer, needs_redis

pytestmark = [pytest.mark.slow, needs_redis]


class Sound(FleetStore):
    """No fault."""


class TrustsEveryByte(FleetStore):
    def read_chunks(self, wanted: Sequence[Any]) -> list[bool]:
        super().read_chunks(wanted)
        return [True] * len(wanted)


class KeepsWhatIsGoneToItself(FleetStore):
    def _drop(self, *given: Any) -> None:
        pass


class GoesOnOverAGap(FleetStore):
    def changes(self, cursor: bytes, timeout: float) -> Changes:
        try:
            return super().changes(cursor, timeout)
        except CursorLost:
            return Changes((), msgspec.msgpack.encode(self._catalogue.begin()), 0, 1)


class SkipsAChange(FleetStore):
    def changes(self, cursor: bytes, timeout: float) -> Changes:
        found = super().changes(cursor, timeout)
        return msgspec.structs.replace(found, changes=found.changes[: max(1, len(found.changes) - 1)])


class TurnsChangesRound(FleetStore):
    def changes(self, cursor: bytes, timeout: float) -> Changes:
        found = super().changes(cursor, timeout)
        return msgspec.structs.replace(found, changes=found.changes[::-1])


class TellsItsOwnChanges(FleetStore):
    def changes(self, cursor: bytes, timeout: float) -> Changes:
        self._catalogue.mine.clear()
        return super().changes(cursor, timeout)


class PublishesBytesThatAreNotThere(FleetStore):
    def _attached(self) -> Any:
        moves = super()._attached()
        moves._bytes.put = lambda keys, extents: [True] * len(keys)
        return moves


class SleepsThroughChanges(FleetStore):
    def changes(self, cursor: bytes, timeout: float) -> Changes:
        time.sleep(timeout)
        return super().changes(cursor, 0.0)


class SaysItHoldsLess(FleetStore):
    @property
    def capacity(self) -> int:
        return super().capacity // 2


class DiscardsForItselfAlone(FleetStore):
    def discard(self, run: RunKey, span: Span) -> None:
        self._check_open()


FAULTS = [
    (TrustsEveryByte, "test_bytes_that_changed_are_a_miss_counted_and_dropped_for_all"),
    (TrustsEveryByte, "test_what_was_never_saved_is_not_there"),
    (KeepsWhatIsGoneToItself, "test_bytes_that_are_gone_are_a_miss_and_dropped_for_all"),
    (GoesOnOverAGap, "test_one_that_lags_beyond_the_log_is_told_and_reads_a_new_snapshot"),
    (SkipsAChange, "test_what_others_publish_and_drop_is_told_in_order"),
    (TurnsChangesRound, "test_what_others_publish_and_drop_is_told_in_order"),
    (TellsItsOwnChanges, "test_what_one_does_itself_is_not_told_to_it"),
    (PublishesBytesThatAreNotThere, "test_one_loads_what_another_saved"),
    (SleepsThroughChanges, "test_changes_are_awaited_until_one_comes"),
    (SaysItHoldsLess, "test_the_place_keeps_within_its_capacity_and_says_what_it_dropped"),
    (DiscardsForItselfAlone, "test_a_discarded_chunk_is_gone_for_all"),
]


def suite_of(made: type[FleetStore], server: RedisServer) -> SharedStoreSuite:
    group = secrets.token_hex(8)

    class Suite(SharedStoreSuite):
        def create(self, place: Path, capacity: int, log_length: int) -> SharedStore:
            options = DirectoryOptions(
                catalogue=server.url, group=group, capacity_gib=capacity / 2**30, log_length=log_length, deadline_s=30.0
            )

            def open_bytes(arena: ArenaFile) -> DirectoryBytes:
                return DirectoryBytes(Folder(place, None), arena, 30.0)

            return made(options, open_bytes)

        def lose_bytes(self, place: Path) -> bool:
            for file in place.rglob("*.kv"):
                file.unlink()
            return True

        def flip_bytes(self, place: Path) -> bool:
            for file in place.rglob("*.kv"):
                file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
            return True

    return Suite()


def passes(suite: SharedStoreSuite, name: str, place: Path) -> bool:
    """Run one test of the suite, as pytest would."""
    members: list[Member] = []

    def join(capacity: int = ROOMY, log_length: int = LONG_LOG) -> Member:
        members.append(Member(suite.create(place, capacity, log_length)))
        return members[-1]

    test = getattr(suite, name)
    offered = {"join": join, "place": place, "ranks": 1}
    try:
        test(**{wanted: offered[wanted] for wanted in inspect.signature(test).parameters})
    except (AssertionError, StopIteration):
        return False
    finally:
        for member in members:
            member.close()
    return True


@pytest.mark.parametrize("test", sorted({test for _, test in FAULTS}))
def test_without_a_fault_there_is_nothing_to_catch(test: str, redis_server: RedisServer, tmp_path: Path) -> None:
    assert passes(suite_of(Sound, redis_server), test, tmp_path / "place")


@pytest.mark.parametrize("faulty, test", FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_suite_catches(faulty: type[FleetStore], test: str, redis_server: RedisServer, tmp_path: Path) -> None:
    assert not passes(suite_of(faulty, redis_server), test, tmp_path / "place"), f"{test} lets {faulty.__name__} pass"
