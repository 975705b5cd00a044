"""Torn, corrupted and foreign files are detected, counted, dropped, and never served."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from blendhub.contracts import Store
from blendhub.testing.sentences import holds
from blendhub.testing.stores.base import Open, StoreTests, chunk, content, key, listed, loaded, run

SMALL = 64


def _flip(at: float) -> Callable[[bytes], bytes]:
    def flipped(whole: bytes) -> bytes:
        place = min(int(at * len(whole)), len(whole) - 1)
        return whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :]

    return flipped


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a byte in the middle flipped": _flip(0.5),
    "no bytes": lambda whole: b"",
    "half the bytes": lambda whole: whole[: len(whole) // 2],
    "a byte more": lambda whole: whole + b"\0",
    "another program's file": lambda whole: b"#!/bin/sh\n" * 100,
}


@holds("What is torn or corrupted on the way is detected, counted in ``corrupted``,")
class DamageTests(StoreTests):
    def file_with(self, path: Path, wanted: bytes) -> Path:
        files = self.files_with(path, wanted)
        if not files:
            pytest.skip("the suite finds no file with this store's bytes; override files_with")
        assert len(files) == 1, f"{files} hold the same bytes, but only one file should"
        return files[0]

    @pytest.fixture
    def two_chunks(self, store: Store) -> Store:
        store.save_run(run("a"))
        for index in range(2):
            store.save(key("a"), chunk(index), [content(index), content(10 + index)])
        return store

    def test_a_damaged_chunk_is_never_served(self, two_chunks: Store, open: Open, path: Path) -> None:
        store, sizes = two_chunks, (4096, 4096)
        for after_restart, (what, damage) in product((False, True), DAMAGES.items()):
            store.save(key("a"), chunk(0), [content(0), content(10)])
            file = self.file_with(path, content(0))
            file.write_bytes(damage(file.read_bytes()))
            if after_restart:
                store = open()
            assert loaded(store, key("a"), chunk(0), sizes) is None, what
            assert store.corrupted == 1, what
            assert loaded(store, key("a"), chunk(0), sizes) is None
            assert listed(store)[key("a")].chunks == (chunk(1),)
            assert store.corrupted == 1, f"{what}: one damaged entry is counted once"
            assert loaded(store, key("a"), chunk(1), sizes) == [content(1), content(11)]
            store.save(key("a"), chunk(0), [content(2)])
            assert loaded(store, key("a"), chunk(0)) == [content(2)]
            store = open()
            assert store.corrupted == 0, f"{what}: a dropped entry must not come back"

    def test_no_flipped_bit_and_no_missing_end_escapes(self, store: Store, path: Path) -> None:
        store.save_run(run("a"))

        def save() -> Path:
            store.save(key("a"), chunk(0), [content(0, SMALL)])
            return self.file_with(path, content(0, SMALL))

        size = save().stat().st_size
        wrong, dropped = [], 0
        for place in range(size):
            for damage in (lambda whole, at=place: whole[:at], _flip(place / size + 0.1 / size)):
                file = save()
                file.write_bytes(damage(file.read_bytes()))
                served = loaded(store, key("a"), chunk(0), (SMALL,))
                dropped += served is None
                # Where there is room for a note the chunk's own bytes are whole.
                if served not in (None, [content(0, SMALL)]):
                    wrong.append(place)
                store.save_run(run("a"))  # it went with its only chunk
        assert wrong == []
        assert store.corrupted == dropped >= size + SMALL, "a cut or a changed byte of the chunk was not noticed"

    def test_neither_swapped_files_nor_missing_ones_are_served(self, two_chunks: Store, open: Open, path: Path) -> None:
        store, sizes = two_chunks, (4096, 4096)
        for after_restart in (False, True):
            files = [self.file_with(path, content(index)) for index in range(2)]
            contents = [file.read_bytes() for file in files]
            for file, other in zip(files, reversed(contents), strict=True):
                file.write_bytes(other)
            if after_restart:
                store = open()
            assert [loaded(store, key("a"), chunk(index), sizes) for index in range(2)] == [None, None]
            assert store.corrupted == 2
            store.save_run(run("a"))
            for index in range(2):
                store.save(key("a"), chunk(index), [content(index), content(10 + index)])
        self.file_with(path, content(0)).unlink()
        assert [loaded(store, key("a"), chunk(index), sizes) for index in range(2)] == [None, [content(1), content(11)]]
        assert store.corrupted == 3

    @holds("When a run's tokens are damaged, its chunks go with it.")
    def test_a_run_with_damaged_tokens_goes_with_its_chunks(self, two_chunks: Store, open: Open, path: Path) -> None:
        store = two_chunks
        store.save_run(run("b"))
        store.save(key("b"), chunk(0), [content(5)])
        for after_restart, (what, damage) in product((False, True), DAMAGES.items()):
            file = self.file_with(path, run("a").tokens)
            file.write_bytes(damage(file.read_bytes()))
            if after_restart:
                store = open()
            assert set(listed(store)) == {key("b")}, what
            assert store.corrupted >= 1
            for index in range(2):
                assert loaded(store, key("a"), chunk(index), (4096, 4096)) is None
            assert loaded(store, key("b"), chunk(0)) == [content(5)]
            store.save_run(run("a"))
            store.save(key("a"), chunk(0), [content(6)])
            store = open()
            assert listed(store)[key("a")].tokens == run("a").tokens
            assert loaded(store, key("a"), chunk(0)) == [content(6)]
            assert store.corrupted == 0, f"{what}: a dropped entry must not come back"

    def test_files_of_others_are_left_alone(self, two_chunks: Store, open: Open, path: Path) -> None:
        beside = self.file_with(path, content(0)).parent
        strangers = [path / "thesis.txt", beside / "photo.jpg", beside / "x.tmp", beside / ".hidden"]
        for stranger in strangers:
            stranger.write_bytes(b"not the store's")
        two_chunks.close()
        store = open()
        assert [stranger.read_bytes() for stranger in strangers] == [b"not the store's"] * 4
        assert store.corrupted == 0
        assert listed(store)[key("a")].chunks == (chunk(0), chunk(1))
