"""The store stays within its capacity, drops the least recently used, and reports what it dropped."""

import pytest

from blendhub.contracts import Store, StoredRun
from blendhub.core.errors import StoreFailed
from blendhub.testing.sentences import holds
from blendhub.testing.stores.base import (
    SHARD_BYTES,
    Open,
    StoreTests,
    chunk,
    content,
    key,
    listed,
    loaded,
    now_and_reopened,
    run,
)

SLACK = 1024
"""Bytes for headers that differ in length by a few bytes; fewer than any chunk takes."""


@holds("The store keeps within ``capacity`` bytes by itself: it drops what was")
class BoundsTests(StoreTests):
    @pytest.fixture
    def full(self, open: Open) -> Store:
        """A store with no room for a fifth chunk beside those of run a, which were saved in order."""
        store = open(self._measure(open))
        self._fill(store)
        return store

    def _measure(self, open: Open) -> int:
        store = open()
        self._fill(store)
        capacity = store.nbytes + SLACK
        for index in range(4):
            store.discard(key("a"), chunk(index))
        assert store.nbytes == 0
        return capacity

    def _fill(self, store: Store) -> None:
        assert store.save_run(run("a")) == []
        for index in range(4):
            assert store.save(key("a"), chunk(index), [content(index)]) == []

    @holds("Saving and loading a chunk are uses.")
    def test_loading_and_saving_again_are_uses(self, full: Store) -> None:
        assert loaded(full, key("a"), chunk(0)) == [content(0)]
        full.save(key("a"), chunk(1), [content(10)])
        dropped = [full.save(key("a"), chunk(index), [content(index)]) for index in (4, 5, 6, 7)]
        assert dropped == [[(key("a"), chunk(index))] for index in (2, 3, 0, 1)]

    @holds("The order of use survives a restart, at least roughly.")
    def test_the_order_of_use_survives_a_restart(self, full: Store, open: Open) -> None:
        loaded(full, key("a"), chunk(0))
        again = open(full.capacity)
        dropped = again.save(key("a"), chunk(4), [content(4, 2 * SHARD_BYTES)])
        assert (key("a"), chunk(0)) not in dropped
        assert {span for _, span in dropped} <= {chunk(index) for index in (1, 2, 3)}

    def test_growing_a_run_may_cost_its_own_chunks_but_not_the_run(self, full: Store) -> None:
        grown = StoredRun(key("a"), run("a").tokens + content(1, 4 * SHARD_BYTES), b"", ())
        assert full.save_run(grown) == [(key("a"), chunk(index)) for index in range(4)]
        assert full.nbytes <= full.capacity
        full.discard(key("a"), chunk(0))
        full.save(key("a"), chunk(7), [b"small"])
        assert listed(full)[key("a")].tokens == grown.tokens

    @holds("A run goes with the last of its chunks; one that has no chunk yet may be")
    def test_runs_without_chunks_do_not_fill_the_store(self, full: Store) -> None:
        for name in range(1000):
            full.save_run(run(name))
            assert full.nbytes <= full.capacity
        full.save(key(999), chunk(0), [content(0)])
        assert loaded(full, key(999), chunk(0)) == [content(0)]

    @holds("Raises StoreFailed when it cannot be written, and when it and its run are")
    def test_what_can_never_fit_is_refused_and_changes_nothing(self, full: Store, open: Open) -> None:
        held, catalogue = full.nbytes, listed(full)
        with pytest.raises(StoreFailed, match="capacity"):
            full.save(key("a"), chunk(4), [content(4, full.capacity)])
        with pytest.raises(StoreFailed, match="capacity"):
            full.save_run(StoredRun(key("b"), content(4, full.capacity // 4 * 4 + 4), b"", ()))
        for reader in now_and_reopened(full, open):
            assert reader.nbytes == held
            assert listed(reader) == catalogue

    def test_a_smaller_capacity_is_kept_from_the_start(self, full: Store, open: Open) -> None:
        smaller = open(full.capacity - 2 * SHARD_BYTES)
        assert smaller.nbytes <= smaller.capacity == full.capacity - 2 * SHARD_BYTES
        assert listed(smaller)[key("a")].chunks == (chunk(2), chunk(3))
