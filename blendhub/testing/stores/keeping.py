"""Saved bytes come back unchanged, also after a restart, and entries do not affect each other."""

from pathlib import Path

import numpy as np

from blendhub.contracts import RunKey, Store, StoredRun
from blendhub.core.spans import Span
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

SHARDS = {
    "one": (4096,),
    "several": (4096, 4096, 4096),
    "one empty among others": (100, 0, 100),
    "only empty ones": (0, 0),
    "a byte": (1,),
    "odd and unequal": (1, 4097, 333),
    "many": (64,) * 300,
    "large": (9 * 2**20 + 5, 2**20),
}

HOSTILE_NAMES = {
    "a way up": "../../../../escaped",
    "an absolute path": "/escaped",
    "a dot": ".",
    "nothing": "",
    "a null byte": "a\0b",
    "a line break": "a\nb",
    "a slash": "a/b",
    "not ASCII": "\u00fc\U0001f4a5",
    "longer than a file name": "x" * 5000,
}


@holds("``load`` returns the bytes that ``save`` was given, or nothing.")
class KeepingTests(StoreTests):
    def test_bytes_come_back_as_they_were_saved(self, open: Open) -> None:
        store = open()
        store.save_run(run("a"))
        saved = [[content(rank, size) for rank, size in enumerate(sizes)] for sizes in SHARDS.values()]
        for index, shards in enumerate(saved):
            assert store.save(key("a"), chunk(index), shards) == []
        for reader in now_and_reopened(store, open):
            for index, (what, sizes) in enumerate(SHARDS.items()):
                assert loaded(reader, key("a"), chunk(index), sizes) == saved[index], what

    def test_every_kind_of_buffer_is_taken(self, store: Store) -> None:
        array = np.arange(600, dtype=np.float32).reshape(20, 30)
        store.save_run(run("a"))
        for shard in (array.tobytes(), bytearray(array.tobytes()), array.data, memoryview(array.tobytes())):
            store.save(key("a"), chunk(0), [shard])
            into = np.zeros_like(array)
            assert store.load(key("a"), chunk(0), [into.data])
            assert (into == array).all()

    @holds("Every run with a chunk, as after a restart; damaged entries are dropped and")
    def test_the_catalogue_survives_a_restart(self, open: Open) -> None:
        store = open()
        for name in ("a", "b"):
            store.save_run(run(name))
        for name, index in (("a", 5), ("a", 0), ("a", 2), ("b", 1)):
            store.save(key(name), chunk(index), [content(index)])
        for reader in now_and_reopened(store, open):
            found = listed(reader)
            assert set(found) == {key("a"), key("b")}
            assert found[key("a")] == StoredRun(
                key("a"), run("a").tokens, run("a").description, (chunk(0), chunk(2), chunk(5))
            )
            assert found[key("b")].chunks == (chunk(1),)
            assert reader.corrupted == 0

    @holds("Bytes held: at least those of all chunks, and of their runs' tokens and")
    def test_bytes_held_are_the_same_after_a_restart(self, open: Open) -> None:
        store = open()
        assert store.nbytes == 0
        store.save_run(run("a"))
        store.save(key("a"), chunk(0), [content(0)])
        held = store.nbytes
        assert held >= 4096 + len(run("a").tokens) + len(run("a").description)
        assert open().nbytes == held

    def test_what_was_never_saved_is_not_there(self, store: Store) -> None:
        store.save_run(run("a"))
        store.save(key("a"), chunk(1), [content(1)])
        for name, span in (("a", chunk(0)), ("b", chunk(1)), ("a", Span(chunk(1).start, chunk(1).end - 1))):
            assert loaded(store, key(name), span) is None
        assert store.corrupted == 0

    @holds("Every run with a chunk, as after a restart; damaged entries are dropped and")
    def test_a_run_without_chunks_is_not_listed(self, open: Open) -> None:
        store = open()
        store.save_run(run("a"))
        assert listed(store) == {}
        assert listed(open()) == {}

    @holds("``run.chunks`` is ignored.")
    def test_the_chunks_given_with_a_run_are_ignored(self, store: Store) -> None:
        store.save_run(StoredRun(key("a"), run("a").tokens, b"", (chunk(3),)))
        store.save(key("a"), chunk(0), [content(0)])
        assert listed(store)[key("a")].chunks == (chunk(0),)

    def test_saving_a_chunk_again_replaces_it(self, open: Open) -> None:
        store = open()
        store.save_run(run("a"))
        store.save(key("a"), chunk(0), [content(0)])
        held = store.nbytes
        store.save(key("a"), chunk(0), [content(1)])
        assert store.nbytes == held
        assert loaded(store, key("a"), chunk(0)) == [content(1)]
        store.save(key("a"), chunk(0), [content(2, 10), content(3, 20)])
        assert loaded(open(), key("a"), chunk(0), (10, 20)) == [content(2, 10), content(3, 20)]

    @holds("Keep a run's tokens and description; replaces an earlier version.")
    def test_saving_a_run_again_replaces_it_and_keeps_its_chunks(self, open: Open) -> None:
        store = open()
        store.save_run(StoredRun(key("a"), run("a").tokens[: 4 * chunk(0).end], b"short", ()))
        store.save(key("a"), chunk(0), [content(0)])
        store.save_run(StoredRun(key("a"), run("a").tokens, b"grown", ()))
        store.save(key("a"), chunk(1), [content(1)])
        for reader in now_and_reopened(store, open):
            assert listed(reader)[key("a")] == StoredRun(key("a"), run("a").tokens, b"grown", (chunk(0), chunk(1)))
            assert loaded(reader, key("a"), chunk(0)) == [content(0)]

    def test_overlapping_chunks_are_apart(self, store: Store) -> None:
        spans = [Span(0, 10), Span(0, 20), Span(10, 20), Span(5, 15), Span(1, 10)]
        store.save_run(run("a"))
        for seed, span in enumerate(spans):
            store.save(key("a"), span, [content(seed)])
        assert listed(store)[key("a")].chunks == tuple(sorted(spans))
        assert [loaded(store, key("a"), span) for span in spans] == [[content(seed)] for seed in range(len(spans))]

    def test_namespaces_and_runs_are_apart(self, open: Open) -> None:
        keys = [RunKey("ab", "c"), RunKey("a", "bc"), RunKey("c", "ab"), RunKey("ab", "C"), RunKey("AB", "c")]
        store = open()
        for seed, name in enumerate(keys):
            store.save_run(StoredRun(name, run("a").tokens, str(name).encode(), ()))
            store.save(name, chunk(0), [content(seed)])
        store = open()
        assert {name: found.description for name, found in listed(store).items()} == {
            name: str(name).encode() for name in keys
        }
        assert [loaded(store, name, chunk(0)) for name in keys] == [[content(seed)] for seed in range(len(keys))]

    @holds("To a store both are text that anyone may have chosen: it must not lead out of")
    def test_names_do_not_lead_out_of_the_store(self, open: Open, tmp_path: Path) -> None:
        names = [
            one for name in HOSTILE_NAMES.values() for one in (RunKey(name, "x"), RunKey("x", name), RunKey(name, name))
        ]
        store = open()
        for seed, hostile in enumerate(names):
            store.save_run(StoredRun(hostile, run("a").tokens, b"", ()))
            store.save(hostile, chunk(0), [content(seed)])
        store = open()
        assert set(listed(store)) == set(names)
        assert [loaded(store, hostile, chunk(0)) for hostile in names] == [
            [content(seed)] for seed in range(len(names))
        ]
        assert [file.name for file in tmp_path.iterdir() if file.name != "store"] == []
        assert not Path("/escaped").exists()

    @holds("The bytes of a chunk that was dropped or discarded are not held any more.")
    def test_a_discarded_chunk_is_gone_for_good(self, open: Open) -> None:
        store = open()
        store.save_run(run("a"))
        for index in range(2):
            store.save(key("a"), chunk(index), [content(index)])
        held = store.nbytes
        store.discard(key("a"), chunk(0))
        assert store.nbytes <= held - SHARD_BYTES
        for reader in now_and_reopened(store, open):
            assert loaded(reader, key("a"), chunk(0)) is None
            assert loaded(reader, key("a"), chunk(1)) == [content(1)]
            assert listed(reader)[key("a")].chunks == (chunk(1),)

    @holds("Forget a chunk, and its run with the last one.")
    def test_a_run_goes_with_its_last_chunk(self, open: Open) -> None:
        store = open()
        store.save_run(run("a"))
        store.save(key("a"), chunk(0), [content(0)])
        store.discard(key("a"), chunk(0))
        assert store.nbytes == 0
        assert listed(store) == {}
        assert open().nbytes == 0

    @holds("Forgetting what is not there is fine.")
    def test_forgetting_what_is_not_there_is_fine(self, store: Store) -> None:
        store.save_run(run("a"))
        store.save(key("a"), chunk(0), [content(0)])
        held = store.nbytes
        for name, span in (("a", chunk(1)), ("b", chunk(0)), ("a", Span(0, 1))):
            store.discard(key(name), span)
        assert store.nbytes == held
        assert store.corrupted == 0
        assert loaded(store, key("a"), chunk(0)) == [content(0)]
