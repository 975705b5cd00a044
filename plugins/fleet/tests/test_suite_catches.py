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
from tests.suite_runs import passes

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


FAULTS = [
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


def test_without_a_fault_there_is_nothing_to_catch(tmp_path: Path) -> None:
    """One of these tests: test_conformance runs the whole suite."""
    assert passes(__name__, "Sound", "test_what_others_publish_and_drop_comes_in_order", tmp_path)


@pytest.mark.usefixtures("without_shrinking")
@pytest.mark.parametrize("faulty, test", FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_suite_catches(faulty: type[FleetStore], test: str, tmp_path: Path) -> None:
    assert not passes(__name__, faulty.__name__, test, tmp_path), f"{test} lets {faulty.__name__} pass"
