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
    note,
    now_and_reopened,
    run,
)

BAD_CALLS: dict[str, Callable[[Store], Any]] = {
    "a chunk of a run that was not saved": lambda store: store.save(key("b"), chunk(0), [content(0)]),
    "a chunk beyond the run's tokens": lambda store: store.save(key("a"), chunk(8), [content(0)]),
    "a chunk partly beyond the run's tokens": lambda store: store.save(key("a"), Span(120, 129), [content(0)]),
    "a chunk of no tokens": lambda store: store.save(key("a"), Span(4, 4), [content(0)]),
    "a chunk of no shards": lambda store: store.save(key("a"), chunk(1), []),
    "a shard that is no buffer": lambda store: store.save(key("a"), chunk(1), [content(0), "text"]),  # type: ignore[list-item]
    "a shard with gaps": lambda store: store.save(key("a"), chunk(1), [memoryview(bytes(64))[::2]]),
    "tokens cut within one": lambda store: store.save_run(StoredRun(key("b"), bytes(13), b"", ())),
    "tokens that no longer cover a chunk": lambda store: store.save_run(StoredRun(key("a"), bytes(4 * 15), b"", ())),
    "a buffer too small": lambda store: loaded(store, key("a"), chunk(0), (4095,)),
    "a buffer too large": lambda store: loaded(store, key("a"), chunk(0), (4097,)),
    "a buffer too few": lambda store: loaded(store, key("a"), chunk(0), ()),
    "a buffer too many": lambda store: loaded(store, key("a"), chunk(0), (4096, 0)),
    "the bytes cut differently": lambda store: loaded(store, key("a"), chunk(0), (2048, 2048)),
    "a buffer that cannot be written": lambda store: store.load(key("a"), chunk(0), [memoryview(bytes(4096))]),
    "a note of a byte too few": lambda store: store.save_note(key("a"), chunk(0), note(0)[1:]),
    "a note of a byte too many": lambda store: store.save_note(key("a"), chunk(0), note(0) + b"1"),
    "a note of no tokens": lambda store: store.save_note(key("a"), Span(4, 4), b""),
    "a note with gaps": lambda store: store.save_note(key("a"), chunk(0), memoryview(2 * note(0))[::2]),
    "a buffer with gaps": lambda store: store.load(key("a"), chunk(0), [memoryview(bytearray(8192))[::2]]),
}

CALLS: dict[str, Callable[[Store], Any]] = {
    "save_run": lambda store: store.save_run(run("a")),
    "save": lambda store: store.save(key("a"), chunk(0), [content(0)]),
    "load": lambda store: loaded(store, key("a"), chunk(0)),
    "save_note": lambda store: store.save_note(key("a"), chunk(0), note(0)),
    "note": lambda store: store.note(key("a"), chunk(0)),
    "discard": lambda store: store.discard(key("a"), chunk(0)),
    "runs": lambda store: list(store.runs()),
}


@holds("Bad input raises InvalidInput and changes nothing.")
class RefusingTests(StoreTests):
    @pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
    def test_bad_input_is_refused_and_changes_nothing(self, open: Open, call: Callable[[Store], Any]) -> None:
        store = open()
        store.save_run(run("a"))
        store.save(key("a"), chunk(0), [content(0)])
        held, known = store.nbytes, listed(store)
        with pytest.raises(InvalidInput, match=r"\w+ \w+ \w+"):
            call(store)
        for reader in now_and_reopened(store, open):
            assert reader.nbytes == held
            assert listed(reader) == known
            assert loaded(reader, key("a"), chunk(0)) == [content(0)]
            assert reader.corrupted == 0

    def test_a_run_must_be_saved_again_after_it_went_with_its_last_chunk(self, store: Store) -> None:
        store.save_run(run("a"))
        store.save(key("a"), chunk(0), [content(0)])
        store.discard(key("a"), chunk(0))
        with pytest.raises(InvalidInput):
            store.save(key("a"), chunk(0), [content(0)])

    @pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
    @holds("A closed store answers everything with StoreFailed.")
    def test_a_closed_store_says_so(self, store: Store, call: Callable[[Store], Any]) -> None:
        store.save_run(run("a"))
        store.save(key("a"), chunk(0), [content(0)])
        store.close()
        with pytest.raises(StoreFailed, match="closed"):
            call(store)

    @holds("Finish writes and close the files. Closing twice is fine.")
    def test_closing_twice_is_fine(self, open: Open) -> None:
        store = open()
        store.close()
        store.close()
        assert open().nbytes == 0

    @holds("A place that another live store object holds is refused with StoreFailed when")
    def test_a_place_in_use_is_refused(self, store: Store, path: Path) -> None:
        store.save_run(run("a"))
        store.save(key("a"), chunk(0), [content(0)])
        with pytest.raises(StoreFailed, match=str(path)):
            self.create(path, ROOMY)
        assert loaded(store, key("a"), chunk(0)) == [content(0)]
        store.close()
        self.create(path, ROOMY).close()
