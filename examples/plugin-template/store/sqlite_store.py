"""The store ``sqlite``: chunks and runs as rows of one SQLite database.

SQLite makes a change whole or absent, keeps other processes out, and needs one lock to serve several threads. What is
left are the bounds, the order of use, and checksums, since a database does not notice when a disk changes its bytes.
"""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from blendhub import PluginSpec, Span, hookimpl
from blendhub.contracts import RunKey, Store, StoredRun
from blendhub.contracts.transport import Buffer
from blendhub.core.errors import InvalidInput, StoreFailed

SETTINGS = "PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;"
TABLES = """
CREATE TABLE IF NOT EXISTS runs (
    key BLOB PRIMARY KEY, tokens BLOB, description BLOB, digest BLOB, size INTEGER, used INTEGER);
CREATE TABLE IF NOT EXISTS chunks (
    key BLOB, first INTEGER, last INTEGER, shards BLOB, sizes BLOB, digest BLOB, size INTEGER, used INTEGER,
    PRIMARY KEY (key, first, last));
CREATE INDEX IF NOT EXISTS sizes_of_runs ON runs (size);
CREATE INDEX IF NOT EXISTS sizes_of_chunks ON chunks (size);
CREATE INDEX IF NOT EXISTS uses ON chunks (used);
"""
HELD = "SELECT (SELECT total(size) FROM runs) + (SELECT total(size) FROM chunks)"
CHUNK = "key = ? AND first = ? AND last = ?"


class SqliteOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: Annotated[str, Meta(min_length=1, description="the directory of the database")] = "blendhub-store"
    capacity_gib: Annotated[float, Meta(gt=0, description="the most it holds, beside SQLite's own pages")] = 10.0


class SqliteStore(Store):
    def __init__(self, options: SqliteOptions) -> None:
        self._path = Path(options.path)
        self._capacity = int(options.capacity_gib * 2**30)
        self._lock = threading.RLock()
        self._corrupted = 0
        self._db: sqlite3.Connection | None = None
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            database = self._path / "store.sqlite"
            self._db = sqlite3.connect(database, timeout=0, isolation_level=None, check_same_thread=False)
            # Exclusive: the first statement locks the file until it is closed, or this process ends.
            self._db.executescript(SETTINGS + TABLES)
            with self._changing():
                self._db.execute("DELETE FROM runs WHERE key NOT IN (SELECT key FROM chunks)")
                self._make_room(0)
        except (sqlite3.Error, OSError) as error:
            raise StoreFailed(f"{self._path} cannot be opened: {error}; no other hub may use it") from None

    def save_run(self, run: StoredRun) -> list[tuple[RunKey, Span]]:
        key, size = _encode(run.key), len(run.tokens) + len(run.description)
        with self._changing() as db:
            (end,) = db.execute("SELECT max(last) FROM chunks WHERE key = ?", [key]).fetchone()
            if end is not None and 4 * end > len(run.tokens):
                raise InvalidInput(f"{len(run.tokens) // 4} tokens do not cover the chunks up to {end}; save them all")
            self._check_size(size)
            db.execute("DELETE FROM runs WHERE key = ?", [key])
            dropped = self._make_room(size, keep=key)
            digest = _digest(run.tokens, run.description)
            row = (key, run.tokens, run.description, digest, size, self._next_use())
            db.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?)", row)
        return dropped

    def save(self, run: RunKey, span: Span, shards: Sequence[Buffer]) -> list[tuple[RunKey, Span]]:
        key, size = _encode(run), sum(map(len, shards))
        with self._changing() as db:
            held = db.execute("SELECT length(tokens), size FROM runs WHERE key = ?", [key]).fetchone()
            if held is None or 4 * span.end > held[0]:
                raise InvalidInput(f"there are no tokens for {span} of {run}; save the run before its chunks")
            self._check_size(held[1] + size)
            db.execute(f"DELETE FROM chunks WHERE {CHUNK}", [key, *_ends(span)])
            dropped = self._make_room(size, keep=key)
            row = (key, *_ends(span), b"".join(shards), _sizes(shards), _digest(*shards), size, self._next_use())
            db.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        return dropped

    def load(self, run: RunKey, span: Span, into: Sequence[memoryview]) -> bool:
        chunk = [_encode(run), *_ends(span)]
        with self._changing() as db:
            found = db.execute(f"SELECT shards, sizes, digest FROM chunks WHERE {CHUNK}", chunk).fetchone()
            if found is None:
                return False
            if found[1] != _sizes(into):
                raise InvalidInput(f"{span} of {run} was saved in other shards than {[*map(len, into)]} bytes")
            at = 0
            for view in into:
                view[:] = found[0][at : at + len(view)]
                at += len(view)
            if _digest(*into) != found[2] or at != len(found[0]):
                self._corrupted += 1
                self._delete(*chunk)
                return False
            db.execute(f"UPDATE chunks SET used = ? WHERE {CHUNK}", [self._next_use(), *chunk])
            return True

    def discard(self, run: RunKey, span: Span) -> None:
        with self._changing():
            self._delete(_encode(run), *_ends(span))

    def runs(self) -> Iterator[StoredRun]:
        with self._changing() as db:
            keys = [key for (key,) in db.execute("SELECT DISTINCT key FROM chunks")]
        for key in keys:
            with self._changing() as db:
                found = db.execute("SELECT tokens, description, digest FROM runs WHERE key = ?", [key]).fetchone()
                spans = db.execute("SELECT first, last FROM chunks WHERE key = ? ORDER BY 1, 2", [key]).fetchall()
                if found and _digest(*found[:2]) != found[2]:
                    self._corrupted += 1
                    db.execute("DELETE FROM runs WHERE key = ?", [key])
                    db.execute("DELETE FROM chunks WHERE key = ?", [key])
                    found = None
            if found and spans:
                yield StoredRun(_decode(key), found[0], found[1], tuple(Span(*span) for span in spans))

    @property
    def nbytes(self) -> int:
        with self._changing() as db:
            return int(db.execute(HELD).fetchone()[0])

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def corrupted(self) -> int:
        return self._corrupted

    def close(self) -> None:
        with self._lock:
            if self._db:
                self._db.close()
                self._db = None

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """One thread at a time; all that is changed here, or nothing if it raises."""
        with self._lock:
            if self._db is None:
                raise StoreFailed(f"the store at {self._path} is closed")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException as error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if isinstance(error, sqlite3.Error):
                    raise StoreFailed(f"{self._path} cannot be used: {error}; is there room on its disk?") from error
                raise

    def _check_size(self, size: int) -> None:
        if size > self._capacity:
            raise StoreFailed(f"{size} bytes do not fit into {self._path}: its capacity is {self._capacity} bytes")

    def _make_room(self, size: int, keep: bytes = b"") -> list[tuple[RunKey, Span]]:
        """Drop what was longest not used, but not the run ``keep``; returns the chunks among it."""
        assert self._db
        (held,) = self._db.execute(HELD).fetchone()
        dropped = []
        while held + size > self._capacity:
            key, first, last = self._db.execute(
                "SELECT key, first, last, used FROM chunks UNION ALL SELECT key, NULL, NULL, used FROM runs "
                "WHERE key != ? AND key NOT IN (SELECT key FROM chunks) ORDER BY used LIMIT 1",
                [keep],
            ).fetchone()[:3]
            self._delete(key, first, last, keep)
            if first is not None:
                dropped.append((_decode(key), Span(first, last)))
            (held,) = self._db.execute(HELD).fetchone()
        return dropped

    def _delete(self, key: bytes, first: int | None, last: int | None, keep: bytes = b"") -> None:
        """A chunk, and its run with the last one; a run without chunks if there is no ``first``."""
        assert self._db
        gone = self._db.execute(f"DELETE FROM chunks WHERE {CHUNK}", [key, first, last]).rowcount
        if key != keep and (gone or first is None):
            unused = "DELETE FROM runs WHERE key = ? AND key NOT IN (SELECT key FROM chunks)"
            self._db.execute(unused, [key])

    def _next_use(self) -> int:
        assert self._db
        query = "SELECT 1 + max((SELECT coalesce(max(used), 0) FROM runs), (SELECT coalesce(max(used), 0) FROM chunks))"
        return int(self._db.execute(query).fetchone()[0])


def _encode(run: RunKey) -> bytes:
    return msgspec.msgpack.encode(run)


def _decode(key: bytes) -> RunKey:
    return msgspec.msgpack.decode(key, type=RunKey)


def _ends(span: Span) -> tuple[int, int]:
    return span.start, span.end


def _sizes(shards: Sequence[Buffer]) -> bytes:
    return msgspec.msgpack.encode([len(shard) for shard in shards])


def _digest(*parts: Buffer) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()


@hookimpl
def blendhub_stores() -> list[PluginSpec[Store]]:
    return [
        PluginSpec(
            name="sqlite",
            api=5,
            summary="chunks as rows of one SQLite database",
            factory=SqliteStore,
            options=SqliteOptions,
            capabilities=("no_files",),
        )
    ]
