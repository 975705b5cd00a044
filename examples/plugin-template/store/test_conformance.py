"""The suite that ships with BlendHub, run on this store."""

import sqlite3
from pathlib import Path

import pytest
from sqlite_store import SqliteOptions, SqliteStore

from blendhub.testing import StoreSuite
from blendhub.testing.stores.base import ROOMY, chunk, content, key, listed, loaded, run


class TestSqliteStore(StoreSuite):
    capabilities = ("no_files",)

    def create(self, path: Path, capacity: int) -> SqliteStore:
        return SqliteStore(SqliteOptions(path=str(path), capacity_gib=capacity / 2**30))

    @pytest.mark.parametrize("damage", ["UPDATE chunks SET shards = zeroblob(4096)", "UPDATE runs SET tokens = x'00'"])
    def test_damaged_rows_are_never_served(self, path: Path, damage: str) -> None:
        """In the place of the suite's tests that damage files."""
        store = self.create(path, ROOMY)
        store.save_run(run("a"))
        store.save(key("a"), chunk(0), [content(0)])
        store.close()
        with sqlite3.connect(path / "store.sqlite") as database:
            database.execute(damage)
        database.close()
        again = self.create(path, ROOMY)
        assert not listed(again) or loaded(again, key("a"), chunk(0)) is None
        assert loaded(again, key("a"), chunk(0)) is None and listed(again) == {} and again.corrupted == 1
        again.close()
