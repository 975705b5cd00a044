"""A crash at any moment leaves each chunk whole or absent; a full disk changes nothing else."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from blendhub.contracts import Store
from blendhub.core.errors import StoreFailed
from blendhub.testing.sentences import holds
from blendhub.testing.stores.base import Open, StoreTests, chunk, content, key, listed, loaded, now_and_reopened, run

KILLS = 8
CRASH_BYTES = 2**20
CRASH_CAPACITY = 24 * CRASH_BYTES
MANY = 10**6


@cache
def _random_bytes(seed: int) -> bytes:
    return content(seed, CRASH_BYTES - 8)


def _chunk_bytes(name: int, index: int, version: int) -> bytes:
    """Made quickly, so that a kill mostly hits a writer that writes."""
    return name.to_bytes(8) + _random_bytes(2 * index + version)


def _write_for_ever(store: Store, first: int, has_saved: Event) -> None:
    for name in range(first, first + MANY):
        store.save_run(run(name))
        for index in range(4):
            for version in range(2):
                store.save(key(name), chunk(index), [_chunk_bytes(name, index, version), b""])
                has_saved.set()
        store.discard(key(name), chunk(0))


@holds("a crash at any moment leaves each chunk whole or absent.")
class CrashTests(StoreTests):
    @pytest.mark.slow
    def test_a_killed_writer_leaves_chunks_whole_or_absent(self, open: Open, path: Path) -> None:
        fork = multiprocessing.get_context("fork")

        def write(first: int, has_saved: Event) -> None:
            _write_for_ever(self.create(path, CRASH_CAPACITY), first, has_saved)

        for seed in range(8):
            _random_bytes(seed)  # before the fork, so that no writer has to make them
        n_loaded = 0
        for kill in range(KILLS):
            has_saved = fork.Event()  # a killed writer may hold the lock of its event
            writer = fork.Process(target=write, args=(kill * MANY, has_saved))
            writer.start()
            assert writer.pid
            assert has_saved.wait(60)
            time.sleep(0.037 * kill)
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
            store = open(CRASH_CAPACITY)
            assert store.corrupted == 0
            assert store.nbytes <= store.capacity
            for stored in store.runs():
                name = int(stored.key.run.removeprefix("run-"))
                assert stored.tokens == run(name).tokens
                for index in range(4):
                    shards = loaded(store, stored.key, chunk(index), (CRASH_BYTES, 0))
                    whole = [[_chunk_bytes(name, index, version), b""] for version in range(2)]
                    assert shards in whole if chunk(index) in stored.chunks else shards is None
                    n_loaded += shards is not None
            assert store.corrupted == 0
            store.close()
        assert n_loaded, f"of all that {KILLS} killed writers saved, no chunk is there when the store is opened again"

    @holds("A write that fails (a full disk) changes nothing else.")
    def test_a_write_that_fails_changes_nothing_else(self, open: Open, path: Path) -> None:
        store = open()
        store.save_run(run("a"))
        store.save(key("a"), chunk(0), [content(0)])
        if not self.files_with(path, content(0)):
            pytest.skip("this store writes no files here, so the suite cannot make its writes fail")
        held, catalogue = store.nbytes, listed(store)
        with _files_at_most(65536):
            for target in (chunk(0), chunk(1)):
                with pytest.raises(StoreFailed, match=str(path)):
                    store.save(key("a"), target, [content(1), content(2, 2**18)])
            with pytest.raises(StoreFailed, match=str(path)):
                store.save_run(run("b", n_chunks=4096))
            store.save(key("a"), chunk(2), [content(3)])
        store.discard(key("a"), chunk(2))
        assert not self.files_with(path, content(1)), "the bytes of a failed write are still there"
        for reader in now_and_reopened(store, open):
            assert reader.nbytes == held
            assert listed(reader) == catalogue
            assert loaded(reader, key("a"), chunk(0)) == [content(0)]
            assert reader.corrupted == 0
        reader.save(key("a"), chunk(1), [content(1), content(2, 2**18)])
        assert loaded(reader, key("a"), chunk(1), (4096, 2**18)) == [content(1), content(2, 2**18)]


@contextmanager
def _files_at_most(size: int) -> Iterator[None]:
    """Makes writes beyond this size fail in this process, as a full disk would."""
    resource = pytest.importorskip("resource", reason="this system has no limits on file sizes")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
