"""Objects that follow each other agree, also with one that comes late, is slow, or was killed."""

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from blendhub.contracts import Deleted
from blendhub.testing.sentences import holds
from blendhub.testing.shared_stores.base import LONG_LOG, ROOMY, FleetTests, Join, Member, chunk, content, key

KILLS = 5


@holds("``changes`` gives what was published and dropped after a cursor, in order and")
class FollowingTests(FleetTests):
    @holds("What an object saves and discards itself is not among its changes;")
    def test_what_one_does_itself_is_not_among_its_changes(self, join: Join) -> None:
        first, other = join(), join()
        first.save("a", 0, 1)
        first.save("a", 1, 1)
        first.discard("a", 0)
        saved, first.catalogue = first.catalogue, {}
        first.follow()
        assert first.catalogue == {}, "its own chunks came among the changes"
        other.follow()
        assert other.catalogue == saved == {key("a"): {chunk(1)}}

    @holds("What one object announces is among the changes of each other one.")
    def test_what_one_announces_the_others_hear_in_order(self, join: Join) -> None:
        first, second, third = join(), join(), join()
        first.save("a", 0, 1)
        said = [Deleted("one tenant's"), Deleted("another's"), Deleted("one tenant's")]
        for deleted in said:
            first.store.announce(deleted)
        for member in (first, second, third):
            member.follow()
        assert second.deleted == third.deleted == said and first.deleted == []
        assert second.catalogue == first.catalogue == {key("a"): {chunk(0)}}, "an announcement drops nothing"
        assert join().deleted == []

    def test_what_happens_while_a_snapshot_is_read_is_not_missed(self, join: Join) -> None:
        first, late = join(), join()
        for name in range(300):
            first.save(name, 0, name)
        runs, cursor = late.store.snapshot()
        seen = {next(runs).key}
        for name in range(0, 300, 2):
            first.discard(name, 0)
        for name in range(300, 330):
            first.save(name, 0, name)
        late.catalogue = {key: {chunk(0)} for key in [*seen, *(stored.key for stored in runs)]}
        late._cursor = cursor
        late.follow()
        assert late.catalogue == first.catalogue and late.lost == 0

    def test_changes_are_awaited_until_one_comes(self, join: Join) -> None:
        first, other = join(), join()
        first.save("a", 0, 1)  # the first may wait until the store has started whatever it needs
        other.follow()
        assert 0.2 <= other.wait_for_changes(0.25) < 1.5
        waiting = threading.Timer(0.3, first.save, ("a", 1, 2))
        waiting.start()
        assert other.wait_for_changes(4.0) < 2.0
        waiting.join()
        other.follow()
        assert other.catalogue == {key("a"): {chunk(0), chunk(1)}}

    def test_how_far_behind_it_is_and_how_many_there_are(self, join: Join) -> None:
        first, second = join(), join()
        for name in range(200):
            first.save(name, 0, name)
        changes = second.store.changes(second._cursor, 1.0)
        assert changes.changes and changes.behind > 0 and changes.hubs == 2
        first.close()
        assert second.store.changes(changes.cursor, 0.0).hubs == 1

    @pytest.mark.slow
    @holds("a crash at any moment leaves each chunk whole or absent.")
    def test_a_killed_writer_leaves_chunks_whole_or_absent(self, join: Join, place: Path) -> None:
        fork = multiprocessing.get_context("fork")

        def write(first: int, has_saved: Event) -> None:
            writer = Member(self.create(place, ROOMY, LONG_LOG))
            for name in range(first, first + 10**6):
                writer.save_batch(name, {index: name + index for index in range(4)})
                has_saved.set()

        reader, n_loaded = join(), 0
        for kill in range(KILLS):
            has_saved = fork.Event()  # a killed writer may hold the lock of its event
            process = fork.Process(target=write, args=(kill * 10**6, has_saved))
            process.start()
            assert process.pid
            assert has_saved.wait(60)
            time.sleep(0.037 * kill)
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            reader.follow()
            assert reader.catalogue == join().catalogue
            for name, spans in list(reader.catalogue.items())[-8:]:
                number = int(name.run.removeprefix("run-"))
                for index in range(len(spans)):
                    assert reader.load(number, index) == [content(number + index)]
                    n_loaded += 1
        assert n_loaded
