"""What one object saves, the others load: the same bytes, or nothing."""

import time
from collections.abc import Callable
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import pytest

from blendhub.contracts import Deleted, StoredRun
from blendhub.core.errors import InvalidInput, StoreFailed
from blendhub.testing.sentences import holds
from blendhub.testing.shared_stores.base import LONG_LOG, ROOMY, FleetTests, Join, Member, chunk, content, key, run

Answer = TypeVar("Answer")
BAD_CALLS: dict[str, Callable[[Member], Any]] = {
    "a chunk of a run that was not saved": lambda member: member.store.save(key("b"), chunk(0), [member.slot(0)]),
    "a chunk beyond the run's tokens": lambda member: member.store.save(key("a"), chunk(8), [member.slot(0)]),
    "a buffer outside the arena": lambda member: member.store.save(key("a"), chunk(1), [bytes(64)]),
    "to load outside the arena": lambda member: member.store.load(key("a"), chunk(0), [memoryview(bytearray(4096))]),
    "a buffer too small": lambda member: member.store.load(key("a"), chunk(0), [member.slot(0, 4095)]),
    "a buffer too many": lambda member: member.store.load(key("a"), chunk(0), [member.slot(0), member.slot(1)]),
    "tokens that do not cover a chunk": lambda member: member.store.save_run(StoredRun(key("a"), bytes(60), b"", ())),
}

CALLS: dict[str, Callable[[Member], Any]] = {
    "save_run": lambda member: member.store.save_run(run("a")),
    "save": lambda member: member.store.save(key("a"), chunk(0), [member.slot(0)]),
    "load": lambda member: member.load("a", 0),
    "discard": lambda member: member.store.discard(key("a"), chunk(0)),
    "runs": lambda member: list(member.store.runs()),
    "snapshot": lambda member: member.store.snapshot(),
    "changes": lambda member: member.follow(),
    "announce": lambda member: member.store.announce(Deleted("a tenant's")),
}
SECONDS = 10.0
"""What the contract calls seconds."""


@holds("What one saved, each of them loads.")
class MovingTests(FleetTests):
    def test_one_loads_what_another_saved(self, join: Join) -> None:
        """A chunk that is saved again comes with its new bytes."""
        writer, reader = join(), join()
        for seed, (name, ranks) in product((7, 17), (("a", 1), ("b", 3))):
            writer.save(name, 0, seed, ranks)
            assert reader.load(name, 0, ranks) == [content(seed + rank) for rank in range(ranks)]
        for member in (writer, reader):
            member.follow()
        assert reader.store.nbytes == writer.store.nbytes

    def test_several_chunks_move_at_a_time(self, join: Join) -> None:
        writer, reader = join(), join()
        n = min(writer.store.at_once, 8)
        writer.save_batch("a", {index: index for index in range(n)})
        chunks = [(key("a"), chunk(index), [reader.slot(index)]) for index in range(n)]
        chunks[-1] = (key("a"), chunk(70), [reader.slot(n - 1)])
        assert reader.store.load_chunks(chunks) == [True] * (n - 1) + [False]
        assert [bytes(reader.slot(index)) for index in range(n - 1)] == [content(index) for index in range(n - 1)]

    def test_a_run_goes_with_its_last_chunk(self, join: Join) -> None:
        writer, other = join(), join()
        writer.save("a", 0, 1)
        other.discard("a", 0)
        other.follow()
        assert other.store.nbytes == 0 and list(other.store.runs()) == []
        writer.save("a", 1, 2)
        assert join().load("a", 1) == [content(2)]

    @holds("``load`` then returns False, and the chunk is dropped from the catalogue, for")
    def test_bytes_that_are_gone_are_a_miss_and_dropped_for_all(self, join: Join, place: Path) -> None:
        writer, reader, third = join(), join(), join()
        writer.save("a", 0, 1)
        if not self.lose_bytes(place):
            pytest.skip("the suite cannot make this store's bytes vanish; override lose_bytes")
        assert reader.load("a", 0) is None
        for member in (writer, third):
            member.follow()
            assert member.catalogue == {}
        assert reader.store.corrupted == 0
        writer.save("a", 0, 3)
        assert third.load("a", 0) == [content(3)]

    @holds("What is torn or corrupted on the way is detected, counted in ``corrupted``,")
    def test_bytes_that_changed_are_a_miss_counted_and_dropped_for_all(self, join: Join, place: Path) -> None:
        writer, reader = join(), join()
        writer.save("a", 0, 1)
        if not self.flip_bytes(place):
            pytest.skip("the suite cannot change this store's bytes; override flip_bytes")
        assert reader.load("a", 0) is None
        assert reader.store.corrupted == 1
        writer.follow()
        assert writer.catalogue == {}

    @holds("``nbytes`` and ``capacity`` are those of the place, as it was last heard of.")
    def test_what_was_longest_not_used_is_dropped_to_keep_within_the_capacity(self, join: Join) -> None:
        capacity = 40_000
        writer, reader = join(capacity=capacity), join(capacity=capacity)
        for name in range(20):
            writer.save(name, 0, name)
            assert reader.load(0, 0) == [content(0)], "it was used most recently, and yet dropped"
            reader.follow()
        writer.follow()
        assert reader.store.nbytes <= capacity == reader.store.capacity
        assert reader.catalogue == writer.catalogue
        assert 2 < len(reader.catalogue) < 20
        for name in range(20):
            expected = [content(name)] if key(name) in reader.catalogue else None
            assert reader.load(name, 0) == expected

    @holds("What does not fit what is stored raises InvalidInput and changes nothing.")
    def test_bad_input_is_refused_and_changes_nothing(self, join: Join) -> None:
        member = join()
        member.save("a", 0, 1)
        for what, call in BAD_CALLS.items():
            with pytest.raises(InvalidInput, match=r"\w+ \w+ \w+"):
                call(member)
                pytest.fail(f"{what} was not refused")
        other = join()
        assert other.catalogue == {key("a"): {chunk(0)}}
        assert other.load("a", 0) == [content(1)]

    @holds("A closed store answers everything with StoreFailed.")
    def test_a_closed_store_says_so(self, join: Join) -> None:
        member = join()
        member.save("a", 0, 1)
        member.store.close()
        for what, call in CALLS.items():
            with pytest.raises(StoreFailed, match="closed"):
                call(member)
                pytest.fail(f"{what} was answered after the store was closed")
        member.store.close()

    @holds("A place that does not answer delays nobody for long: every call ends within")
    def test_a_place_that_does_not_answer_delays_nobody_for_long(self, place: Path) -> None:
        with self.silence(place):
            store = self.create(place, ROOMY, LONG_LOG)
            with pytest.raises(StoreFailed):
                list(store.snapshot()[0])
        _once_it_answers(lambda: list(store.snapshot()[0]))
        with closing(Member(store)) as member:
            _once_it_answers(lambda: member.save("a", 0, 1))
            with self.silence(place):
                for what, call in CALLS.items():
                    began = time.monotonic()
                    with pytest.raises(StoreFailed):
                        call(member)
                        pytest.fail(f"{what} was answered, but the place is silent")
                    assert time.monotonic() - began < SECONDS, f"{what} took long"
            assert _once_it_answers(lambda: member.load("a", 0)) == [content(1)]

    @holds("An object that the others have taken for dead publishes nothing more until it has")
    def test_one_that_was_taken_for_dead_publishes_nothing_until_it_joins_again(self, join: Join, place: Path) -> None:
        one, other = join(), join()
        one.save("a", 0, 1)
        if not self.take_for_dead(place):
            pytest.skip("the suite cannot have this store's objects taken for dead; override take_for_dead")
        with pytest.raises(StoreFailed):
            one.save("a", 1, 2)
        other.follow()
        assert other.catalogue == {key("a"): {chunk(0)}}
        one.follow()
        one.save("a", 1, 3)
        other.follow()
        assert other.catalogue == {key("a"): {chunk(0), chunk(1)}} and other.load("a", 1) == [content(3)]

    @holds("``attach`` comes before the first chunk moves.")
    def test_chunks_move_only_behind_an_attached_arena(self, place: Path) -> None:
        store = self.create(place, 2**20, 100)
        with pytest.raises(StoreFailed, match="attach"):
            store.load(key("a"), chunk(0), [memoryview(bytearray(4096))])
        store.close()


def _once_it_answers(call: Callable[[], Answer]) -> Answer:
    """The answer of a place that was silent a moment ago."""
    until = time.monotonic() + SECONDS
    while True:
        try:
            return call()
        except StoreFailed:
            assert time.monotonic() < until, "the place answers again, but the store does not ask it"
            time.sleep(0.05)
