"""Saved bytes come back unchanged, also after a restart; names and sizes of any kind are taken."""

from pathlib import Path

from blendhub.contracts import RunKey, StoredRun
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

SHARDS = [(4096,), (4096,) * 3, (100, 0, 100), (0, 0), (1,), (1, 4097, 333), (64,) * 300, (9 * 2**20 + 5, 2**20)]
"""The sizes of a chunk's shards."""

HOSTILE_NAMES = ("../../../../escaped", "/escaped", ".", "", "a\0b", "a\nb", "a/b", "\u00fc\U0001f4a5", "x" * 5000)
SIMILAR_NAMES = [RunKey("ab", "c"), RunKey("a", "bc"), RunKey("c", "ab"), RunKey("ab", "C"), RunKey("AB", "c")]


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

    @holds("Keep a run's tokens and description; replaces an earlier version.")
    def test_saving_a_run_again_replaces_it_and_keeps_its_chunks(self, open: Open) -> None:
        """``save_run`` ignores the chunks of the run that it is called with."""
        store = open()
        store.save_run(StoredRun(key("a"), run("a").tokens[: 4 * chunk(0).end], b"short", (chunk(3),)))
        store.save(key("a"), chunk(0), [content(0)])
        store.save_run(StoredRun(key("a"), run("a").tokens, b"grown", (chunk(3),)))
        for reader in now_and_reopened(store, open):
            assert listed(reader)[key("a")] == StoredRun(key("a"), run("a").tokens, b"grown", (chunk(0),))
            assert loaded(reader, key("a"), chunk(0)) == [content(0)]

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

    @holds("The bytes of a chunk that was dropped or discarded are not held any more.")
    def test_a_discarded_chunk_is_gone_for_good_and_a_run_with_its_last_one(self, open: Open) -> None:
        store = open()
        store.save_run(run("a"))
        for index in range(2):
            store.save(key("a"), chunk(index), [content(index)])
        held = store.nbytes
        assert held >= 2 * SHARD_BYTES + len(run("a").tokens) + len(run("a").description)
        store.discard(key("a"), chunk(0))
        left = store.nbytes
        assert left <= held - SHARD_BYTES
        for reader in now_and_reopened(store, open):
            assert loaded(reader, key("a"), chunk(0)) is None
            assert loaded(reader, key("a"), chunk(1)) == [content(1)]
            assert reader.nbytes == left
        reader.discard(key("a"), chunk(1))
        assert (reader.nbytes, listed(reader), open().nbytes) == (0, {}, 0)
