"""Shared stores with one fault each, and the test of the suite that must see it."""

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
from harness.servers.redis_server import needs_redis
from plugins.fleet.tests import test_conformance
from tests.suite_runs import all_tests, proofs

pytestmark = [pytest.mark.slow, needs_redis, pytest.mark.usefixtures("without_shrinking")]


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
        changes = super().changes(cursor, timeout)
        return msgspec.structs.replace(changes, changes=changes.changes[: max(1, len(changes.changes) - 1)])


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
        runs = list(super().snapshot()[0])
        now = self._catalogue.begin()
        # Behind all but the last few of the changes that the test makes.
        return iter(runs), msgspec.msgpack.encode(msgspec.structs.replace(now, seq=now.seq + 170))


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
        return self._unpublished.get(run)


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
    (PublishesBytesThatAreNotThere, "test_one_loads_what_another_saved"),
    (LoadsOneChunkOnly, "test_several_chunks_move_at_a_time"),
    (KeepsTheFirstBytes, "test_a_chunk_that_is_saved_again_comes_with_its_new_bytes"),
    (DiscardsForItselfAlone, "test_a_run_goes_with_its_last_chunk"),
    (KeepsWhatIsGoneToItself, "test_bytes_that_are_gone_are_a_miss_and_dropped_for_all"),
    (TrustsEveryByte, "test_bytes_that_changed_are_a_miss_counted_and_dropped_for_all"),
    (TakesNoLoadForAUse, "test_what_was_longest_not_used_is_dropped_to_keep_within_the_capacity"),
    (SaysItHoldsLess, "test_what_was_longest_not_used_is_dropped_to_keep_within_the_capacity"),
    (TakesAnyChunk, "test_bad_input_is_refused_and_changes_nothing"),
    (AnswersAfterItWasClosed, "test_a_closed_store_says_so"),
    (AnswersWithoutAnArena, "test_chunks_move_only_behind_an_attached_arena"),
    (SkipsAChange, "test_what_others_publish_and_drop_comes_in_order"),
    (ReportsItsOwnChanges, "test_what_one_does_itself_is_not_among_its_changes"),
    (KeepsAnnouncementsToItself, "test_what_one_announces_the_others_hear_in_order"),
    (BeginsBehindItsSnapshot, "test_what_happens_while_a_snapshot_is_read_is_not_missed"),
    (SleepsThroughChanges, "test_changes_are_awaited_until_one_comes"),
    (ThinksItIsAlone, "test_how_far_behind_it_is_and_how_many_there_are"),
    (PublishesBeforeTheBytesMove, "test_a_killed_writer_leaves_chunks_whole_or_absent"),
    (GoesOnOverAGap, "test_any_history"),
]


class Suite(test_conformance.TestDirectory):
    """That it passes without a fault, test_conformance tests."""

    plugin: type[FleetStore]

    def create(self, place: Path, capacity: int, log_length: int) -> SharedStore:
        with patch.object(directory, "FleetStore", self.plugin):
            return super().create(place, capacity, log_length)


globals().update(proofs(Suite, FAULTS))


def test_a_faulty_store_proves_each_test() -> None:
    assert {test for _, test in FAULTS} == all_tests(Suite)
