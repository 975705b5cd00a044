"""The conformance suite of shared stores: the shared directory passes it, and stores with one fault each fail the test
that must see it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from blendhub_fleet import directory
from blendhub_fleet.store import FleetStore
from msgspec.structs import replace

from blendhub import PluginHost
from blendhub.contracts import Changes, SharedStore
from blendhub.core.errors import CursorLost, StoreFailed
from blendhub.testing.shared_stores import SharedStoreSuite
from blendhub.testing.target import Target
from harness.servers.redis_server import RedisServer, needs_redis
from plugins.fleet.tests.in_redis import InRedis
from tests.suite_runs import proofs

pytestmark = [pytest.mark.slow, needs_redis]
HOST = PluginHost.discover()


class TestDirectory(InRedis, SharedStoreSuite):
    @pytest.fixture(autouse=True)
    def server(self, redis_server: RedisServer) -> None:
        type(self).redis = redis_server

    def create(self, place: Path, capacity: int, log_length: int) -> SharedStore:
        options = {"catalogue": self.redis.url, "path": str(place), "deadline_s": self.deadline_s}
        options |= self.options_for(place, capacity, log_length)
        store: SharedStore = HOST.create("store", "shared_directory", options)
        return store

    def lose_bytes(self, place: Path) -> bool:
        for file in place.rglob("*.kv"):
            file.unlink()
        return True

    def flip_bytes(self, place: Path) -> bool:
        for file in place.rglob("*.kv"):
            content = bytearray(file.read_bytes())
            content[100] ^= 4
            file.write_bytes(content)
        return True


def test_the_conformance_command_takes_the_suite_of_shared_stores() -> None:
    assert issubclass(Target("store", "shared_directory", {"path": "/mnt/kv"}).suite(), SharedStoreSuite)


# Faulty stores.


def faulty(**changed: Any) -> Callable[..., SharedStore]:
    def create(suite: Any, *given: Any) -> SharedStore:
        with patch.object(directory, "FleetStore", type("Faulty", (FleetStore,), changed)):
            return TestDirectory.create(suite, *given)

    return create


def fault(method: str, instead: Callable[..., Any]) -> Callable[..., SharedStore]:
    """A store with another method, which gets the honest one, the store and the arguments."""
    honest = getattr(FleetStore, method)
    return faulty(**{method: lambda store, *given: instead(partial(honest, store), store, *given)})


def last_change_skipped(changes: Callable[..., Any], store: Any, *at: Any) -> Any:
    answer = changes(*at)
    return replace(answer, changes=answer.changes[: max(1, len(answer.changes) - 1)])


def gap_passed_over(changes: Callable[..., Any], store: Any, *at: Any) -> Any:
    try:
        return changes(*at)
    except CursorLost:
        return Changes((), msgspec.msgpack.encode(store._catalogue.begin()), 0, 1)


def done_here_alone(honest: Any, store: Any, *given: Any) -> None:
    store._check_open()


def misses_where_nobody_answers(load: Callable[..., Any], store: Any, wanted: Any) -> list[bool]:
    try:
        return load(wanted)
    except StoreFailed:
        return [False] * len(wanted)


def asks_when_it_is_opened(opened: Callable[..., None], store: Any, *given: Any) -> None:
    opened(*given)
    store.snapshot()


def joins_to_save(save: Callable[..., Any], store: Any, *given: Any) -> Any:
    store.snapshot()
    return save(*given)


FAULTS: dict[str, list[Any]] = {
    "test_a_run_goes_with_its_last_chunk": [fault("discard", done_here_alone)],
    "test_bytes_that_are_gone_are_a_miss_and_dropped_for_all": [fault("_drop", done_here_alone)],
    "test_what_was_longest_not_used_is_dropped_to_keep_within_the_capacity": [
        faulty(capacity=2**40),
    ],
    "test_a_place_that_does_not_answer_delays_nobody_for_long": [
        fault("load_chunks", misses_where_nobody_answers),
        fault("__init__", asks_when_it_is_opened),
    ],
    "test_one_that_was_taken_for_dead_publishes_nothing_until_it_joins_again": [fault("save_chunks", joins_to_save)],
    "test_chunks_move_only_behind_an_attached_arena": [
        fault("load_chunks", lambda load, store, wanted: load(wanted) if store._moves else [False]),
    ],
    "test_what_one_announces_the_others_hear_in_order": [fault("announce", done_here_alone)],
    "test_any_history": [fault("changes", gap_passed_over), fault("changes", last_change_skipped)],
}


globals().update(proofs(TestDirectory, FAULTS))
