"""A suite that nothing fails is worth nothing: shared stores with one fault each, and the test that must see it."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from blendhub_fleet import directory
from blendhub_fleet.store import FleetStore

from blendhub.contracts import Changes, RunKey, SharedStore
from blendhub.core.errors import CursorLost
from blendhub.core.spans import Span
from blendhub.testing.shared_stores import SharedStoreSuite
from harness.servers.redis_server import RedisServer, needs_redis
from plugins.fleet.tests import test_conformance
from tests.suite_runs import all_tests, passes

pytestmark = [pytest.mark.slow, needs_redis]


class Sound(FleetStore):
    """No fault."""


class TrustsEveryByte(FleetStore):
    def load_chunks(self, wanted: Sequence[Any]) -> list[bool]:
        super().load_chunks(wanted)
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


class ReportsItsOwnChanges(FleetStore):
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


class KeepsAnnouncementsToItself(FleetStore):
    def announce(self, deleted: Any) -> None:
        self._check_open()


class BeginsBehindItsSnapshot(FleetStore):
    def snapshot(self) -> Any:
        runs, _ = super().snapshot()
        now = self._catalogue.begin()
        # All but the last few of the changes that the test makes: the scan, whose order is Redis's, shows only some.
        return runs, msgspec.msgpack.encode(msgspec.structs.replace(now, seq=now.seq + 170))


class ThinksItIsAlone(FleetStore):
    def changes(self, cursor: bytes, timeout: float) -> Changes:
        return msgspec.structs.replace(super().changes(cursor, timeout), behind=0, hubs=1)


class LoadsOneChunkOnly(FleetStore):
    def load_chunks(self, wanted: Sequence[Any]) -> list[bool]:
        return super().load_chunks(wanted[:1]) + [False] * (len(wanted) - 1)


class KeepsTheFirstBytes(FleetStore):
    def save_chunks(self, run: RunKey, chunks: Any) -> Any:
        saved = self.__dict__.setdefault("saved", set())
        new = [each for each in chunks if (run, each[0]) not in saved]
        saved.update((run, span) for span, _ in new)
        return super().save_chunks(run, new) if new else []


class TakesNoLoadForAUse(FleetStore):
    def load_chunks(self, wanted: Sequence[Any]) -> list[bool]:
        self._catalogue.seq = 0
        return super().load_chunks(wanted)


class TakesAnyChunk(FleetStore):
    def _check_tokens(self, run: RunKey, end: int) -> Any:
        return self._given.get(run)


class AnswersAfterItWasClosed(FleetStore):
    def load_chunks(self, wanted: Sequence[Any]) -> list[bool]:
        return [False] * len(wanted) if self._closed else super().load_chunks(wanted)


class AnswersWithoutAnArena(FleetStore):
    def load_chunks(self, wanted: Sequence[Any]) -> list[bool]:
        return super().load_chunks(wanted) if self._moves else [False] * len(wanted)


class PublishesBeforeTheBytesMove(FleetStore):
    def save_chunks(self, run: RunKey, chunks: Any) -> Any:
        moves: Any = self._attached()
        put, moves._bytes.put = moves._bytes.put, lambda keys, extents: [True] * len(keys)
        records: list[Any] = []
        key_of, moves._keys = moves._keys, lambda given: records.extend(given) or key_of(given)
        try:
            gone = super().save_chunks(run, chunks)
        finally:
            moves._bytes.put, moves._keys = put, key_of
        time.sleep(0.01)
        put(key_of(records[: len(chunks)]), moves._extents([shards for _, shards in chunks]))
        return gone


FAULTS = [
    (KeepsAnnouncementsToItself, "test_what_one_announces_the_others_hear_in_order"),
    (BeginsBehindItsSnapshot, "test_what_happens_while_a_snapshot_is_read_is_not_missed"),
    (ThinksItIsAlone, "test_how_far_behind_it_is_and_how_many_there_are"),
    (PublishesBeforeTheBytesMove, "test_a_killed_writer_leaves_chunks_whole_or_absent"),
    (LoadsOneChunkOnly, "test_several_chunks_move_at_a_time"),
    (KeepsTheFirstBytes, "test_a_chunk_that_is_saved_again_comes_with_its_new_bytes"),
    (DiscardsForItselfAlone, "test_a_run_goes_with_its_last_chunk"),
    (TakesNoLoadForAUse, "test_what_is_used_stays_longer"),
    (TakesAnyChunk, "test_bad_input_is_refused_and_changes_nothing"),
    (AnswersAfterItWasClosed, "test_a_closed_store_says_so"),
    (AnswersWithoutAnArena, "test_chunks_move_only_behind_an_attached_arena"),
    (TrustsEveryByte, "test_bytes_that_changed_are_a_miss_counted_and_dropped_for_all"),
    (TrustsEveryByte, "test_any_history"),
    (KeepsWhatIsGoneToItself, "test_bytes_that_are_gone_are_a_miss_and_dropped_for_all"),
    (GoesOnOverAGap, "test_any_history"),
    (SkipsAChange, "test_what_others_publish_and_drop_comes_in_order"),
    (TurnsChangesRound, "test_what_others_publish_and_drop_comes_in_order"),
    (ReportsItsOwnChanges, "test_what_one_does_itself_is_not_among_its_changes"),
    (PublishesBytesThatAreNotThere, "test_one_loads_what_another_saved"),
    (SleepsThroughChanges, "test_changes_are_awaited_until_one_comes"),
    (SaysItHoldsLess, "test_the_place_keeps_within_its_capacity_and_says_what_it_dropped"),
    (DiscardsForItselfAlone, "test_any_history"),
]


class Suite(test_conformance.TestDirectory):
    fault = "Sound"

    @pytest.fixture(autouse=True)
    def server(self) -> None:
        """The Redis of the tests around."""

    def create(self, place: Path, capacity: int, log_length: int) -> SharedStore:
        with patch.object(directory, "FleetStore", globals()[self.fault]):
            return super().create(place, capacity, log_length)


def suite_of(fault: str) -> type[SharedStoreSuite]:
    return type("Suite", (Suite,), {"fault": fault})


@pytest.fixture(autouse=True)
def server(redis_server: RedisServer) -> None:
    Suite.url = redis_server.url


def test_a_faulty_store_proves_each_test() -> None:
    assert {test for _, test in FAULTS} == all_tests(SharedStoreSuite)


def test_without_a_fault_there_is_nothing_to_catch(tmp_path: Path) -> None:
    """One of these tests: test_conformance runs the whole suite."""
    assert passes(__name__, "Sound", "test_what_others_publish_and_drop_comes_in_order", tmp_path)


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("faulty, test", FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_suite_catches(faulty: type[FleetStore], test: str, tmp_path: Path) -> None:
    assert not passes(__name__, faulty.__name__, test, tmp_path), f"{test} lets {faulty.__name__} pass"
