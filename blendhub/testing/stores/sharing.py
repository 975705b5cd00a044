"""Threads that save, load and discard concurrently see whole chunks, and leave a consistent store."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path

from blendhub.contracts import Store, StoredRun
from blendhub.core.errors import InvalidInput, StoreFailed
from blendhub.testing.sentences import holds
from blendhub.testing.stores.base import ROOMY, Open, StoreTests, chunk, content, key, listed, loaded, run

NAMES = range(3)
INDICES = range(4)
THREADS = 6
STEPS = 250
SHARED_BYTES = 2**15
LARGE = content(9, 2**24)
VERSIONS = [content(version, SHARED_BYTES) for version in range(3)]


@holds("All methods block, and may be called from several threads at once.")
class StoreSharingTests(StoreTests):
    def test_threads_on_the_same_chunks_see_them_whole(self, open: Open) -> None:
        for capacity in (ROOMY, 6 * SHARED_BYTES):
            store = open(capacity)
            with ThreadPoolExecutor(THREADS) as pool:
                assert all(pool.map(_any_calls, [store] * THREADS, range(THREADS)))
            assert store.nbytes <= store.capacity and store.corrupted == 0
            held, catalogue = store.nbytes, listed(store)
            again = open(store.capacity)
            assert (again.nbytes, listed(again)) == (held, catalogue)
            for name, index in product(NAMES, INDICES):
                chunks = catalogue[key(name)].chunks if key(name) in catalogue else ()
                shards = loaded(again, key(name), chunk(index), (SHARED_BYTES, SHARED_BYTES))
                assert (shards is not None) == (chunk(index) in chunks)
            assert again.corrupted == 0

    @holds("Finish writes and close the files. Closing twice is fine.")
    def test_closing_waits_for_saves_under_way(self, open: Open, path: Path) -> None:
        for milliseconds in range(0, 12, 2):
            store = open()
            store.save_run(run("a"))
            started = threading.Event()
            with ThreadPoolExecutor(1) as pool:
                saving = pool.submit(_save_until_closed, store, started)
                started.wait()
                time.sleep(milliseconds / 1000)
                store.close()
                at_close = _sizes(path)
                saved = saving.result()
            assert _sizes(path) == at_close, "files changed after the store was closed"
            again = open()
            assert again.corrupted == 0
            for index in range(saved):
                assert loaded(again, key("a"), chunk(index), (len(LARGE),)) == [LARGE]
                again.discard(key("a"), chunk(index))


def _save_until_closed(store: Store, started: threading.Event) -> int:
    """The number of saves before the store refused one because it was closed."""
    for index in INDICES:
        started.set()
        try:
            store.save(key("a"), chunk(index), [LARGE])
        except StoreFailed:
            return index
    return len(INDICES)


def _sizes(path: Path) -> dict[Path, int]:
    return {file: file.stat().st_size for file in path.rglob("*") if file.is_file()}


def _any_calls(store: Store, seed: int) -> int:
    """Random calls on few chunks; returns how many loads gave bytes."""
    choose = random.Random(seed)
    n_loaded = 0
    for _ in range(STEPS):
        name, index = choose.choice(NAMES), choose.choice(INDICES)
        match choose.choice(("save", "save", "load", "load", "list", "discard")):
            case "save":
                version = choose.choice(VERSIONS)
                store.save_run(StoredRun(key(name), run(name).tokens, b"", ()))
                with suppress(InvalidInput):  # another thread discarded the run with its last chunk in between
                    store.save(key(name), chunk(index), [version, version])
            case "load":
                shards = loaded(store, key(name), chunk(index), (SHARED_BYTES, SHARED_BYTES))
                if shards is not None:
                    assert shards[0] in VERSIONS
                    assert shards[0] == shards[1], "shards of two versions were mixed"
                    n_loaded += 1
            case "list":
                for stored in store.runs():
                    assert stored.tokens == run(stored.key.run.removeprefix("run-")).tokens
            case _:
                store.discard(key(name), chunk(index))
    return n_loaded
