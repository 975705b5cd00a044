"""Bad input and closed stores are refused with typed errors, and nothing changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blendhub.contracts import Store, StoredRun
from blendhub.core.errors import InvalidInput, StoreFailed
from blendhub.core.spans import Span
from blendhub.testing.sentences import holds
from blendhub.testing.stores.base import (
    ROOMY,
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

BAD_CALLS: dict[str, Callable[[Store], Any]] = {
    "a chunk of a run that was not saved": lambda store: store.save(key("b"), chunk(0), [content(0)]),
    "a chunk beyond the run's tokens": lambda store: store.save(key("a"), chunk(8), [content(0)]),
    "a chunk partly beyond the run's tokens": lambda store: store.save(key("a"), Span(120, 129), [content(0)]),
    "tokens that no longer cover a chunk": lambda store: store.save_run(StoredRun(key("a"), bytes(4 * 15), b"", ())),
    "a buffer too small": lambda store: loaded(store, key("a"), chunk(0), (4095,)),
    "a buffer too large": lambda store: loaded(store, key("a"), chunk(0), (4097,)),
    "a buffer too few": lambda store: loaded(store, key("a"), chunk(0), ()),
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
