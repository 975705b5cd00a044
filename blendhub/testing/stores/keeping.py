"""What a store keeps, within which bounds, and what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blendhub.contracts import RunKey, Store, StoredRun
from blendhub.core.errors import InvalidInput, StoreFailed
from blendhub.core.spans import Span
from blendhub.testing.sentences import holds
from blendhub.testing.stores.base import (
    ROOMY,
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

SHARDS = [(4096,), (4096,) * 3, (100, 0, 100), (0, 0), (1,), (1, 4097, 333), (64,) * 300, (9 * 2**20 + 5, 2**20)]
"""The sizes of a chunk's shards."""

HOSTILE_NAMES = ("../../../../escaped", "/escaped", ".", "", "a\0b", "a\nb", "a/b", "\u00fc\U0001f4a5", "x" * 5000)
SIMILAR_NAMES = [RunKey("ab", "c"), RunKey("a", "bc"), RunKey("c", "ab"), RunKey("ab", "C"), RunKey("AB", "c")]

SLACK = 1024
"""Bytes for headers that differ in length by a few bytes; fewer than any chunk takes."""

BAD_CALLS: dict[str, Callable[[Store], Any]] = {
    "a chunk of a run that was not saved": lambda store: store.save(key("b"), chunk(0), [content(0)]),
    "a chunk partly beyond the run's tokens": lambda store: store.save(key("a"), Span(120, 129), [content(0)]),
    "tokens that no longer cover a chunk": lambda store: store.save_run(StoredRun(key("a"), bytes(4 * 15), b"", ())),
    "a buffer too small": lambda store: loaded(store, key("a"), chunk(0), (4095,)),
    "a buffer too many": lambda store: loaded(store, key("a"), chunk(0), (4096, 0)),
    "the bytes cut differently": lambda store: loaded(store, key("a"), chunk(0), (2048, 2048)),
}

CALLS: dict[str, Callable[[Store], Any]] = {
    "save_run": lambda store: store.save_run(run("a")),
    "save": lambda store: store.save(key("a"), chunk(0), [content(0)]),
    "load": lambda store: loaded(store, key("a"), chunk(0)),
    "discard": lambda store: store.discard(key("a"), chunk(0)),
    "runs": lambda store: list(store.runs()),
}


@holds("``load`` returns the bytes that ``save`` was given, or nothing.")
class KeepingTests(StoreTests):
    def test_bytes_come_back_as_they_were_saved(self, open: Open) -> None:
        store = open()
        store.save_run(run("a"))
        saved = [[content(rank, size) for rank, size in enumerate(sizes)] for sizes in SHARDS]
        for index, shards in enumerate(saved):
            assert store.save(key("a"), chunk(index), shards) == []
        for reader in now_and_reopened(store, open):
            for index, sizes in enumerate(SHARDS):
                assert loaded(reader, key("a"), chunk(index), sizes) == saved[index]

    @holds("To a store both are text that anyone may have chosen: it must not lead out of")
    def test_names_do_not_lead_out_of_the_store(self, open: Open, tmp_path: Path) -> None:
        hostile = [pair for name in HOSTILE_NAMES for pair in ((name, "x"), ("x", name), (name, name))]
        names = [*(RunKey(*pair) for pair in hostile), *SIMILAR_NAMES]
        store = open()
        for seed, name in enumerate(names):
            store.save_run(StoredRun(name, run("a").tokens, b"", ()))
            store.save(name, chunk(0), [content(seed)])
        store = open()
        assert set(listed(store)) == set(names)
        assert [loaded(store, name, chunk(0)) for name in names] == [[content(seed)] for seed in range(len(names))]
        assert [file.name for file in tmp_path.iterdir() if file.name != "store"] == []
        assert not Path("/escaped").exists()


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


@holds("What does not fit what is stored raises InvalidInput and changes nothing.")
class StoreRefusingTests(StoreTests):
    def test_bad_input_is_refused_and_changes_nothing(self, open: Open) -> None:
        store = open()
        store.save_run(run("a"))
        store.save(key("a"), chunk(0), [content(0)])
        held, catalogue = store.nbytes, listed(store)
        for what, call in BAD_CALLS.items():
            with pytest.raises(InvalidInput, match=r"\w+ \w+ \w+"):
                call(store)
                pytest.fail(f"{what} was not refused")
            assert (store.nbytes, listed(store)) == (held, catalogue), f"{what} changed something"
        for reader in now_and_reopened(store, open):
            assert reader.nbytes == held
            assert listed(reader) == catalogue
            assert loaded(reader, key("a"), chunk(0)) == [content(0)]
            assert reader.corrupted == 0

    @holds("A closed store answers everything with StoreFailed.")
    def test_a_closed_store_says_so(self, store: Store) -> None:
        store.save_run(run("a"))
        store.save(key("a"), chunk(0), [content(0)])
        store.close()
        for what, call in CALLS.items():
            with pytest.raises(StoreFailed, match="closed"):
                call(store)
                pytest.fail(f"{what} was answered after the store was closed")
        store.close()  # twice is fine

    @holds("A place that another live store object holds is refused with StoreFailed when")
    def test_a_place_in_use_is_refused(self, store: Store, path: Path) -> None:
        store.save_run(run("a"))
        store.save(key("a"), chunk(0), [content(0)])
        with pytest.raises(StoreFailed, match=str(path)):
            self.create(path, ROOMY)
        assert loaded(store, key("a"), chunk(0)) == [content(0)]
        store.close()
        self.create(path, ROOMY).close()
