"""What all parts of the suite share: members of a fleet, each a store object with an arena and what it knows."""

import hashlib
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

import pytest

from blendhub.contracts import ArenaFile, Deleted, Dropped, Published, RunKey, SharedStore, StoredRun
from blendhub.core.errors import CursorLost
from blendhub.core.spans import Span
from blendhub.framework.host import PluginHost
from blendhub.framework.options import parse_options
from blendhub.testing.stores.base import CHUNK_TOKENS, SHARD_BYTES, chunk, content, key, run

__all__ = ["CHUNK_TOKENS", "SHARD_BYTES", "Catalogue", "FleetTests", "Join", "Member", "chunk", "content", "key", "run"]

ROOMY = 2**30
SLOTS = 16
PAGE = mmap.PAGESIZE
LONG_LOG = 10_000
Catalogue: TypeAlias = dict[RunKey, set[Span]]


class Member:
    """A store object, its arena, and what it knows of the place: as a hub does, it follows."""

    def __init__(self, store: SharedStore) -> None:
        self.store = store
        # A file that ends with this process, which tests kill.
        self._file = os.fdopen(os.memfd_create("conformance"), "wb")
        size = SLOTS * SHARD_BYTES
        self._file.truncate(PAGE + size)
        self.memory = mmap.mmap(self._file.fileno(), PAGE + size)
        file = ArenaFile(f"/proc/{os.getpid()}/fd/{self._file.fileno()}", PAGE, size)
        store.attach(file, memoryview(self.memory)[PAGE:])
        self.catalogue: Catalogue = {}
        self.deleted: list[Deleted] = []
        """What others have announced."""
        self.lost = 0
        """How often its cursor was not known any more."""
        self._cursor = self._take_snapshot()

    def slot(self, index: int, size: int = SHARD_BYTES) -> memoryview:
        start = PAGE + index * SHARD_BYTES
        return memoryview(self.memory)[start : start + size]

    def save(self, name: object, index: int, seed: int, ranks: int = 1) -> None:
        """Save a chunk, with the tokens of its run if the store asks for them."""
        self.save_batch(name, {index: seed}, ranks)

    def save_batch(self, name: object, seeds: dict[int, int], ranks: int = 1) -> None:
        chunks = []
        for place, (index, seed) in enumerate(seeds.items()):
            shards = [self.slot(place * ranks + rank) for rank in range(ranks)]
            for rank, shard in enumerate(shards):
                shard[:] = content(seed + rank)
            chunks.append((chunk(index), shards))
        self.store.save_run(run(name))
        assert self.store.save_chunks(key(name), chunks) == []
        self.catalogue.setdefault(key(name), set()).update(span for span, _ in chunks)

    def load(self, name: object, index: int, ranks: int = 1) -> list[bytes] | None:
        into = [self.slot(SLOTS - 1 - rank) for rank in range(ranks)]
        for shard in into:
            shard[:] = content(99)
        if self.store.load(key(name), chunk(index), into):
            return [bytes(shard) for shard in into]
        self._forget(key(name), [chunk(index)])
        return None

    def discard(self, name: object, index: int) -> None:
        self.store.discard(key(name), chunk(index))
        self._forget(key(name), [chunk(index)])

    def follow(self) -> None:
        """Take in everything that happened so far."""
        while True:
            before = self._cursor
            try:
                self._take_changes(0.0)
            except CursorLost:
                self.lost += 1
                self._cursor = self._take_snapshot()
            if self._cursor == before:
                return

    def wait_for_changes(self, timeout: float) -> float:
        """Seconds until changes came, or until there were none for so long."""
        began = time.monotonic()
        self._take_changes(timeout)
        return time.monotonic() - began

    def _take_changes(self, timeout: float) -> None:
        changes = self.store.changes(self._cursor, timeout)
        for change in changes.changes:
            self._apply(change)
        self._cursor = changes.cursor

    def close(self) -> None:
        self.store.close()
        self._file.close()

    def _take_snapshot(self) -> bytes:
        runs, cursor = self.store.snapshot()
        self.catalogue = {}
        for stored in runs:
            self._apply(Published(stored))
        return cursor

    def _apply(self, change: Published | Dropped | Deleted) -> None:
        if isinstance(change, Deleted):
            self.deleted.append(change)
            return
        if isinstance(change, Dropped):
            self._forget(change.run, change.chunks)
            return
        stored: StoredRun = change.run
        assert stored.chunks and stored.chunks == tuple(sorted(stored.chunks))
        assert 4 * stored.chunks[-1].end <= len(stored.tokens), "tokens do not cover the chunks that are published"
        name = stored.key.run.removeprefix("run-")
        assert stored.tokens == run(name).tokens, "a run has come with other tokens"
        assert stored.description == run(name).description
        self.catalogue.setdefault(stored.key, set()).update(stored.chunks)

    def _forget(self, name: RunKey, spans: "list[Span] | tuple[Span, ...]") -> None:
        chunks = self.catalogue.get(name, set())
        chunks.difference_update(spans)
        if not chunks:
            self.catalogue.pop(name, None)


Join: TypeAlias = Callable[..., Member]


class FleetTests(ABC):
    """Base of the parts of the suite. A subclass's ``create`` opens the store under test."""

    contract: ClassVar[type] = SharedStore

    @abstractmethod
    def create(self, place: Path, capacity: int, log_length: int) -> SharedStore:
        """One more object with that place open. It holds ``capacity`` bytes, and about ``log_length`` changes."""

    @classmethod
    def of_installed(cls, host: PluginHost, name: str, options: Mapping[str, Any]) -> type[Self]:
        """The suite of an installed store; raises if it cannot be created with these options."""

        def create(suite: object, place: Path, capacity: int, log_length: int) -> Any:
            return host.create("store", name, {**options, **cls.options_for(place, capacity, log_length)})

        parse_options(f"store {name!r}", host.spec("store", name).options, {**options, **cls.options_for(Path(), 1, 1)})
        return type("TestInstalledStore", (cls,), {"create": create})

    @classmethod
    def options_for(cls, place: Path, capacity: int, log_length: int) -> dict[str, Any]:
        """The options that open an installed store as ``create`` would: places are groups."""
        group = hashlib.sha256(str(place).encode()).hexdigest()[:16]
        return {"group": group, "capacity_gib": capacity / 2**30, "log_length": log_length}

    def lose_bytes(self, place: Path) -> bool:
        """Make the bytes of all chunks vanish, as an engine does that evicts; False if the suite cannot have that."""
        return False

    def flip_bytes(self, place: Path) -> bool:
        """Change a byte of every chunk; False if the suite cannot have that."""
        return False

    def take_for_dead(self, place: Path) -> bool:
        """Do what the others do with objects that were silent for long, to all; False if the suite cannot have that."""
        return False

    def silence(self, place: Path) -> AbstractContextManager[None]:
        """Have the place answer nobody meanwhile. Objects that are opened from then on have short deadlines."""
        pytest.skip("the suite cannot silence this store's place; override silence")

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        return tmp_path / "place"

    @pytest.fixture
    def join(self, place: Path) -> Iterator[Join]:
        """Opens the place of this test once more."""
        members: list[Member] = []

        def open_one_more(capacity: int = ROOMY, log_length: int = LONG_LOG) -> Member:
            members.append(Member(self.create(place, capacity, log_length)))
            return members[-1]

        yield open_one_more
        with ThreadPoolExecutor() as pool:  # a store may wait for a process that ends
            list(pool.map(Member.close, members))
